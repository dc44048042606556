# SPDX-License-Identifier: Apache-2.0
"""Command lines of this system's processes, and locks that belong to one process."""
