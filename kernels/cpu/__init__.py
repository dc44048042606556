# SPDX-License-Identifier: Apache-2.0
"""Models on the CPU by a C++ library: attention that reads the paged pool directly, products with
packed matrices, and all layers of a decoder in one call. The installation compiles the library if
there is a compiler.

`library.py` loads the library and chooses the variant for the processor; `paged_attention.py`,
`matrix.py` and `network.py` call the library. Without the library, torch's operators compute."""
