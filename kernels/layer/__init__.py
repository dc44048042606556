# SPDX-License-Identifier: Apache-2.0
"""Kernels for the work of a layer between its matrix products: the norm, the gate, and rotary
positions with the write of K and V.

If they cannot run, functions of `engine/models/layers.py` and `rope.py` and `write_kv` run instead.
The kernels round their results at the same places as these functions.
"""
