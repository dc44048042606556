# SPDX-License-Identifier: Apache-2.0
"""Structured answers: the backends, the compiling of grammars, and the masks of a step."""
