# SPDX-License-Identifier: Apache-2.0
"""Models on the CPU in C++, built at the installation if there is a compiler: attention that reads
the paged pool directly, products with packed matrices, and all layers of a decoder in one call.

`library.py` loads the library and chooses its variant for this processor; `paged_attention.py`,
`matrix.py` and `network.py` call it. Without the library, torch's operators compute."""
