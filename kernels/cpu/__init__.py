# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU over the pool where it lies: C++, built by the installation where it can.

`library.py` finds the library and says which variant of it this processor runs, `step.py` has what
the kernels of `kernels/` call. Where there is no library the plain twins run.
"""
