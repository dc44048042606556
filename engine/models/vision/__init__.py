# SPDX-License-Identifier: Apache-2.0
"""Encoders that turn the pixels of pictures into embeddings of prompt tokens."""
