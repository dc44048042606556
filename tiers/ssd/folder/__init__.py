# SPDX-License-Identifier: Apache-2.0
"""Opens, locks, identifies, checks and repairs the folder of an SSD store."""
