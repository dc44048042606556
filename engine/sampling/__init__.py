# SPDX-License-Identifier: Apache-2.0
"""Sampling of tokens from logits. No module here imports the scheduler, the API or the CLI."""
