# SPDX-License-Identifier: Apache-2.0
"""Kernels: attention over the paged pool, KV writes, block copies, and the CPU's compiled library.

A kernel is a public function in the file of its name. The function checks its arguments and runs
the Triton kernel (`*_triton.py`) or the plain twin in torch (`*_plain.py`); both have the same
signature. `kernel_choice.py` makes the choice. This folder imports no other folder of StrataKV, and
imports triton only to run a Triton kernel.
"""
