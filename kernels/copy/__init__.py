# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks: gather, scatter, and batches for the copy (DMA) engine."""
