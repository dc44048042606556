# SPDX-License-Identifier: Apache-2.0
"""Subcommands for tiers: `cache`, `check`, `describe` and `ping`."""
