# SPDX-License-Identifier: Apache-2.0
"""Tiers keep KV blocks outside the device. They never import torch, the connector or the engine."""
