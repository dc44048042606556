# SPDX-License-Identifier: Apache-2.0
"""Compile every shipped kernel configuration, without a GPU, and report its resources.

The tool needs Triton, which contains NVIDIA's assembler and disassembler. Without options it writes
`kernels/resources.json`. For every configuration, for sm_80 and sm_90, this table has the
registers, the spilled bytes, the shared memory, the number of programs that a multiprocessor runs
at the same time, and the work of a pass of each inner loop (`machine_code.py`). With another Triton
than that of `constraints.txt`, the tool writes `kernels/resources-triton-VERSION.json`, which may
have only the configurations by which the launch tables were chosen.

The exit status is 1 if a configuration exceeds a limit or if an instruction in its `needs` is
missing; the tool then writes the table, and the tests fail. The exit status is also 1 if machine
code costs more than in the present table; then nothing is written unless `--accept` is given. The
tool does not check results of kernels. `kernel_model.py` predicts times from the table.

    python tools/compile_kernels.py                         compile all, write the table
    python tools/compile_kernels.py --only 'write_kv.*'     compile some, replace their rows
    python tools/compile_kernels.py --only 'write_kv.*' --print      print theirs, write nothing"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine_code

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "kernels" / "resources.json"
PINNED = re.compile(r"^triton==(\S+)", re.MULTILINE)
MAX_REGISTERS = 255
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # limit of one program, for sm_80 and sm_90
# Limits of a multiprocessor: registers, which are allocated in units of 8 per thread, warps,
# programs. Each program takes 1 KiB more shared memory than it requests.
REGISTERS, REGISTER_UNIT, MAX_WARPS, MAX_PROGRAMS = 65536, 8, 64, 32
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024}
PROGRAM_SHARED_BYTES = 1024
NEEDS_TARGET = 90  # the target whose machine code must have a configuration's `needs`


def declared() -> Iterator[Any]:
    """Return the configurations that the package ships, from `kernels/shipped.py`."""
    from stratakv.kernels.shipped import shipped_configurations

    yield from shipped_configurations()


def read_from(path: Path) -> Iterator[Any]:
    """The configurations in one file outside the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield from module.shipped_configurations()


def compile_for(configuration: Any, target: int) -> tuple[dict[str, Any], bytes]:
    """Compile a configuration; return the compiler's figures and the machine code.

    The figures include the number of warps and the work of a tile, for `kernel_model.py`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = configuration.function.arg_names
    types = {**dict.fromkeys(configuration.constexprs, "constexpr"), **configuration.signature}
    aligned = {
        (arguments.index(name),): [["tt.divisibility", 16]]
        for name, type_ in configuration.signature.items()
        if type_.startswith("*") or name in configuration.multiples_of_16
    }
    source = ASTSource(
        configuration.function,
        {name: types[name] for name in arguments},
        dict(configuration.constexprs),
        aligned,
    )
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", target, 32),
            options={"num_warps": configuration.num_warps, "num_stages": configuration.num_stages},
        )
    registers, shared = _number(r"Used (\d+) registers", log.getvalue()), compiled.metadata.shared
    found = {
        "programs": side_by_side(target, registers, shared, configuration.num_warps),
        "registers": registers,
        "spilled_bytes": _number(r"(\d+) bytes spill stores", log.getvalue())
        + _number(r"(\d+) bytes spill loads", log.getvalue()),
        "shared_bytes": shared,
        "warps": configuration.num_warps,
        "tile_bytes": configuration.tile_bytes,
        "tile_flops": configuration.tile_flops,
    }
    return found, compiled.asm["cubin"]


def side_by_side(target: int, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Return the number of programs that a multiprocessor of `target` can run at the same time."""
    of_a_thread = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        REGISTERS // (of_a_thread * 32 * num_warps),
        SHARED_BYTES[target] // (shared_bytes + PROGRAM_SHARED_BYTES),
        MAX_WARPS // num_warps,
        MAX_PROGRAMS,
    )


def table_of(version: str) -> Path:
    """The path of the resource table for this version of Triton."""
    pinned = PINNED.search((ROOT / "constraints.txt").read_text())
    if pinned is None or pinned[1] == version:
        return TABLE
    return TABLE.with_name(f"resources-triton-{version}.json")


def _number(pattern: str, log: str) -> int:
    found = re.findall(pattern, log)
    if len(found) != 1:
        raise SystemExit(f"expected one {pattern!r} in ptxas' log, got {len(found)}:\n{log}")
    return int(found[0])


def faults(
    configuration: Any, target: int, found: dict[str, Any], mnemonics: set[str]
) -> Iterator[str]:
    """Yield a sentence for each limit that a compiled configuration exceeds."""
    if found["registers"] > MAX_REGISTERS:
        yield f"expected at most {MAX_REGISTERS} registers, got {found['registers']}"
    if found["spilled_bytes"]:
        yield f"expected no spill, got {found['spilled_bytes']} bytes"
    if found["shared_bytes"] > MAX_SHARED_BYTES[target]:
        limit = MAX_SHARED_BYTES[target]
        yield f"expected at most {limit} bytes of shared memory, got {found['shared_bytes']}"
    if target != NEEDS_TARGET:
        return
    if lacks := sorted(configuration.needs - mnemonics):
        yield f"expected {', '.join(lacks)} in the machine code, got none"
    if 0 < found["programs"] < configuration.min_programs:  # 0 has been reported above
        yield (
            f"expected room for {configuration.min_programs} programs on a multiprocessor, "
            f"got {found['programs']}"
        )


def worse(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each cost of a compiled configuration above the cost in the table."""
    if after["programs"] < before["programs"]:
        yield (
            f"expected room for {before['programs']} programs on a multiprocessor as before, "
            f"got {after['programs']}"
        )
    if after["spilled_bytes"] > before["spilled_bytes"]:
        yield f"expected {before['spilled_bytes']} bytes spilled, got {after['spilled_bytes']}"
    yield from machine_code.worse(before["passes"], after["passes"])


def compile_all(
    configurations: list[Any], known: dict[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the new table of resources, all exceeded limits, and all costs above those of
    `known`."""
    import triton

    names = [configuration.name for configuration in configurations]
    wrong = [f"{name}: expected one of that name" for name in names if names.count(name) > 1]
    chosen = sorted(configurations, key=lambda item: item.name)
    table: dict[str, dict[str, Any]] = {configuration.name: {} for configuration in chosen}
    dearer = []
    for target in MAX_SHARED_BYTES:
        some = [it for it in chosen if divmod(target, 10) >= it.min_capability]
        compiled = [compile_for(configuration, target) for configuration in some]
        codes = machine_code.disassemble([cubin for _, cubin in compiled], target)
        for configuration, (found, _), code in zip(some, compiled, codes, strict=True):
            found["passes"] = machine_code.passes(code)
            table[configuration.name][f"sm_{target}"] = found
            mnemonics = {one.mnemonic for one in code}
            where = f"{configuration.name} sm_{target}"
            wrong += [f"{where}: {it}" for it in faults(configuration, target, found, mnemonics)]
            if before := known.get(configuration.name, {}).get(f"sm_{target}"):
                dearer += [f"{where}: {it}" for it in worse(before, found)]
    return {"triton": triton.__version__, "configurations": table}, sorted(wrong), dearer


def _rows(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the version of Triton that wrote a table, and its rows; empty without a table."""
    if not path.exists():
        return "", {}
    table = json.loads(path.read_text())
    return table["triton"], table["configurations"]


def _text(table: dict[str, Any]) -> str:
    """Return the table as JSON, a line for each target of a configuration and pass of a loop."""
    rows = []
    for name, row in sorted(table["configurations"].items()):
        targets = []
        for target, found in sorted(row.items()):
            passes = ",\n    ".join(json.dumps(one, sort_keys=True) for one in found["passes"])
            head = json.dumps({key: found[key] for key in sorted(found) if key != "passes"})[:-1]
            targets.append(f'   "{target}": {head}, "passes": [\n    {passes}]}}')
        rows.append(f'  "{name}": {{\n' + ",\n".join(targets) + "}")
    text = ",\n".join(rows)
    return f'{{"triton": "{table["triton"]}",\n "configurations": {{\n{text}}}}}'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="names to compile, as shell patterns")
    parser.add_argument("--from", dest="source", type=Path, help="a file with configurations")
    parser.add_argument("--list", action="store_true", help="print the names and compile nothing")
    parser.add_argument("--print", action="store_true", help="print the table and write nothing")
    parser.add_argument("--accept", action="store_true", help="write what costs more, too")
    parser.add_argument("--against", type=Path, help="compare with this table, not the checked-in")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET=1 leaves nothing to compile; unset it")
    if options.source and not (options.print or options.list):
        parser.error("the table has shipped configurations only; add --print")
    with tempfile.TemporaryDirectory() as cache:
        # A cached kernel would produce no log, and two configurations may compile the same kernel.
        os.environ.update(TRITON_CACHE_DIR=cache, TRITON_ALWAYS_COMPILE="1")
        os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
        found = list(read_from(options.source) if options.source else declared())
        patterns = options.only or ["*"]
        chosen = [it for it in found if any(fnmatch.fnmatchcase(it.name, p) for p in patterns)]
        if options.list:
            print("\n".join(sorted(item.name for item in chosen)))
            return 0
        import triton

        path = table_of(triton.__version__)
        version, known = _rows(options.against or path)
        if version != triton.__version__:  # figures of two compilers are not comparable
            if options.only and not options.print and version:
                parser.error(
                    f"the table is triton {version}'s, not {triton.__version__}'s; compile all"
                )
            known = {}
        table, wrong, dearer = compile_all(chosen, known)
    for fault in (*wrong, *dearer):
        print(fault, file=sys.stderr)
    if options.print:
        print(_text(table))
    elif dearer and not options.accept:
        print(f"{path.name} is as it was: --accept writes what costs more", file=sys.stderr)
    else:
        names = {item.name for item in found}
        kept = {name: row for name, row in known.items() if name in names} if options.only else {}
        table["configurations"] = {**kept, **table["configurations"]}
        path.write_text(_text(table) + "\n")
        print(f"compiled {len(chosen)} of {len(table['configurations'])} configurations")
    return 1 if wrong or (dearer and not options.accept) else 0


if __name__ == "__main__":
    sys.exit(main())
