# SPDX-License-Identifier: Apache-2.0
"""Models on the CPU in C++, built during the installation if it has a compiler: attention over the
pool in place, products with packed matrices, and all layers of a decoder in one call.

`library.py` finds the library and its variant for this processor; `paged_attention.py`, `matrix.py`
and `network.py` call it. Without a library torch's operators run.
"""
