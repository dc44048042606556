# SPDX-License-Identifier: Apache-2.0
"""Tiers keep KV blocks outside the GPU. The package imports no torch, connector or engine code."""
