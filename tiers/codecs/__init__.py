# SPDX-License-Identifier: Apache-2.0
"""Codecs, which encode and decode a tier's blocks. Never imports torch, numpy or a tier."""
