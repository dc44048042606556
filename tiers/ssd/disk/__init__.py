# SPDX-License-Identifier: Apache-2.0
"""The disk as the SSD tier uses it: slots of one file, by threads, with O_DIRECT."""
