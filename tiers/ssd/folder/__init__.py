# SPDX-License-Identifier: Apache-2.0
"""The folder of an SSD store: opening, locking, identity, checks and repair."""
