# SPDX-License-Identifier: Apache-2.0
"""The modules of `tools/on_gpu.py`, which import only the standard library."""
