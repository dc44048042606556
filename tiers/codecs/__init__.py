# SPDX-License-Identifier: Apache-2.0
"""Codecs encode blocks for a tier and decode them again. Never imports torch, numpy or a tier."""
