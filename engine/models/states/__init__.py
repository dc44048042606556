# SPDX-License-Identifier: Apache-2.0
"""Layers that carry a state: its shape, where it lies, what a step does to it, and their mixers."""
