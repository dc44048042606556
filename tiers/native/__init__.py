# SPDX-License-Identifier: Apache-2.0
"""C++ functions for operations on many bytes. Each call releases the interpreter's lock (GIL).

`setup.py` compiles `bytes.cpp` and `names.cpp` if it can; `native_library.py` loads the library.
Without the library, or on a processor without its instructions, xxhash and hashlib are used."""
