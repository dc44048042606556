# SPDX-License-Identifier: Apache-2.0
"""Turns logits into tokens. No module here imports the scheduler, the API or the CLI."""
