# SPDX-License-Identifier: Apache-2.0
"""Keeps the way from logits to tokens; never imports the scheduler, the API or the CLI."""
