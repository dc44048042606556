# SPDX-License-Identifier: Apache-2.0
"""Keeps the choice of what runs in the next step; never imports torch, the API or the CLI."""
