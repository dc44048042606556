# SPDX-License-Identifier: Apache-2.0
"""Tiers, which keep KV blocks outside the GPU. Imports no torch, connector or engine code."""
