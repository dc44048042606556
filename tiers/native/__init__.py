# SPDX-License-Identifier: Apache-2.0
"""Bytes in C++: what the tiers do to many of them, in one call that leaves the interpreter to
others.

`setup.py` compiles `bytes.cpp` and `names.cpp` where it can, `native_library.py` finds what came of
it. Without it, or on a processor that lacks the instructions, xxhash and hashlib do the same.
"""
