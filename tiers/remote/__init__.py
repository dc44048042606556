# SPDX-License-Identifier: Apache-2.0
"""The remote tier: a store like `tiers/ssd`, but cache servers keep its blocks."""
