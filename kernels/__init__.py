# SPDX-License-Identifier: Apache-2.0
"""Bytes on the device: attention over the paged pool, KV writes, block copies.

Each kernel is one public function in a file of its name, which checks its arguments and runs either
the Triton kernel (`*_triton.py`) or its plain twin in torch (`*_plain.py`) behind the same
signature. `kernel_choice.py` makes the choice. This folder imports nothing of ours outside it, and
triton only when a Triton kernel is to run.
"""
