# SPDX-License-Identifier: Apache-2.0
"""Runs a Python program in a process of the nursery's: `python -m tests.page_program FILE`, or
`-c CODE`."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> int:
    sys.path.insert(0, os.getcwd())  # as `python FILE` does where the file lies there
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-c":
        memory = os.memfd_create("code")  # a file of which nothing is left
        os.write(memory, sys.argv.pop(1).encode())
        runpy.run_path(f"/proc/self/fd/{memory}", run_name="__main__")
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
