# SPDX-License-Identifier: Apache-2.0
"""Generate the Python code of every `proto/v1/*.proto` into the folder of its source.

`make proto` runs the tool; `tests/proto/test_generated_code.py` compares its output with the
checked-in code.

The compiler is that of `grpcio-tools`, pinned to a version that generates code for protobuf 6.31.1.
Generated code runs with newer versions of protobuf, but refuses older versions."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def sources() -> list[Path]:
    """The `.proto` files, relative to the repository root, in a fixed order."""
    return sorted(path.relative_to(ROOT) for path in ROOT.glob("proto/v*/*.proto"))


def generate(out: Path) -> list[Path]:
    """Write the generated files to `out/proto/v1/` and return their paths, relative to `out`.
    `-Istratakv/proto=proto` sets the virtual path of the files to that of the installed package, so
    that a generated module imports another as `stratakv.proto.v1.…`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-Istratakv/proto=proto"]
        command += [f"--python_out={folder}", f"--pyi_out={folder}"]
        command += [str(path) for path in sources()]
        subprocess.run(command, cwd=ROOT, check=True)
        made = sorted(path for path in Path(folder, "stratakv").rglob("*") if path.is_file())
        written = []
        for path in made:
            target = path.relative_to(Path(folder, "stratakv"))
            (out / target).parent.mkdir(parents=True, exist_ok=True)
            # The compiler copies no comments, so the licence line is added here.
            (out / target).write_text(SPDX + path.read_text())
            written.append(target)
        return written


def main() -> int:
    """Generate the code into the repository, or into the folder of `--out`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="default: the repository")
    out: Path = parser.parse_args().out
    for path in generate(out):
        print(out / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
