# SPDX-License-Identifier: Apache-2.0
"""Keeps blocks outside the device; never imports torch, the connector or the engine."""
