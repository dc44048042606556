# SPDX-License-Identifier: Apache-2.0
"""The way from logits to tokens. No module here imports the scheduler, the API or the CLI."""
