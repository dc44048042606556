# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench tiers`: slab and SSD store held against what memory and disk can do at most."""
