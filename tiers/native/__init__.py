# SPDX-License-Identifier: Apache-2.0
"""C++ functions for operations on many bytes. Each call releases the interpreter's lock (GIL).

`setup.py` compiles `bytes.cpp` and `names.cpp` if it can; `native_library.py` loads the library.
If the library is missing, or the processor lacks instructions that the library needs, xxhash and
hashlib are used."""
