# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: the grammar backends, grammar compilation, and the token masks of a step."""
