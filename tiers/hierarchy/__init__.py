# SPDX-License-Identifier: Apache-2.0
"""The tiers as one: looks blocks up, promotes them into the slab and writes them back."""
