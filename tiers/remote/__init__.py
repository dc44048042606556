# SPDX-License-Identifier: Apache-2.0
"""The remote tier: a store like `tiers/ssd`, whose blocks are kept by cache servers."""
