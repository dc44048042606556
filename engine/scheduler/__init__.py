# SPDX-License-Identifier: Apache-2.0
"""Decides which requests run in the next step; never imports torch, the API or the CLI."""
