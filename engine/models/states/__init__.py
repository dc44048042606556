# SPDX-License-Identifier: Apache-2.0
"""Layers that carry a state: the state's shape, its slots, its use in a step, and the mixers."""
