# SPDX-License-Identifier: Apache-2.0
"""Keeps the engine core: model, pool, tiers and scheduler put together, its loop, its process."""
