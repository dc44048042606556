# SPDX-License-Identifier: Apache-2.0
"""Models on the CPU in C++, built by the installation where it can: attention over the pool in
place, products with matrices in an order of their own, and all layers of a decoder in one call.

`library.py` finds the library and its variant for this processor, `paged_attention.py`, `matrix.py`
and `network.py` call it. Without a library the plain twins run: torch's operators, one by one.
"""
