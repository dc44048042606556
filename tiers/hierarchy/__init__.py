# SPDX-License-Identifier: Apache-2.0
"""Joins the tiers: looks blocks up, promotes them into the slab and writes them back."""
