# SPDX-License-Identifier: Apache-2.0
"""Encoders of pictures: pixels in, embeddings of prompt tokens out."""
