# SPDX-License-Identifier: Apache-2.0
"""The index of the slot file: which slot holds which block, in memory and in LMDB."""
