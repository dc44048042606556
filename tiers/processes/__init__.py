# SPDX-License-Identifier: Apache-2.0
"""Processes of the system: their command lines, and locks that belong to one process."""
