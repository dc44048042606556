# SPDX-License-Identifier: Apache-2.0
"""Keeps the rules that choose which block leaves a tier; never imports torch or the engine."""
