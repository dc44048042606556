# SPDX-License-Identifier: Apache-2.0
"""Operations on many bytes in C++, each in one call that releases the interpreter's lock.

`setup.py` compiles `bytes.cpp` and `names.cpp` where it can; `native_library.py` finds the library.
Without it, or on a processor without the instructions, xxhash and hashlib do the work.
"""
