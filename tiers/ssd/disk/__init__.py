# SPDX-License-Identifier: Apache-2.0
"""The SSD tier's access to the disk: threads that read and write slots of a file with O_DIRECT."""
