# SPDX-License-Identifier: Apache-2.0
"""Parsers of tool calls in a model's text."""
