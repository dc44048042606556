# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in what a model writes."""
