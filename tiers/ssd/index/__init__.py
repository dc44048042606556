# SPDX-License-Identifier: Apache-2.0
"""The index of the slot file, in memory and in LMDB: the block in each slot."""
