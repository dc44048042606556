# SPDX-License-Identifier: Apache-2.0
"""Blocks between pool and slab: gathered, scattered, and copied by the DMA engine."""
