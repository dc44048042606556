# SPDX-License-Identifier: Apache-2.0
"""Encodes blocks on their way to a tier and decodes them; never imports torch, numpy or a tier."""
