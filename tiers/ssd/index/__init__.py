# SPDX-License-Identifier: Apache-2.0
"""Which slot holds which block: in memory, and in LMDB."""
