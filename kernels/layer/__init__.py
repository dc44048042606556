# SPDX-License-Identifier: Apache-2.0
"""Kernels for the work between a layer's matrix products: the norm, the gated activation, and the
rotation of queries and keys with the write of K and V.

Where the kernels of this folder cannot run, functions of `engine/models/layers.py`, `rope.py` and
`write_kv` run. Kernels and functions round values at the same steps."""
