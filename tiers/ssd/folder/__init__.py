# SPDX-License-Identifier: Apache-2.0
"""A store's folder: opened, locked, identified, checked and reconciled."""
