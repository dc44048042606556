# SPDX-License-Identifier: Apache-2.0
"""Kernels: attention over the paged KV pool, KV writes, block copies, and the CPU's C++ library.

A kernel is a public function in a file of the same name. The function checks its arguments and runs
the Triton kernel (`*_triton.py`) or plain torch (`*_plain.py`); the two have the same signature.
`kernel_choice.py` chooses the implementation. This folder imports no other folder of StrataKV, and
imports triton only to run a Triton kernel."""
