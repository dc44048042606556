# SPDX-License-Identifier: Apache-2.0
"""Keeps answers to a grammar: backends, compiling them, and the masks of a step."""
