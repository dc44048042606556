# SPDX-License-Identifier: Apache-2.0
"""The parts of `tools/on_gpu.py`. They import only the standard library."""
