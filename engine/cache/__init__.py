# SPDX-License-Identifier: Apache-2.0
"""Keeps the account of KV blocks: which is free, which is shared, which name finds which."""
