# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between the device and the tiers; never imports the engine."""
