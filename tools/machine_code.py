# SPDX-License-Identifier: Apache-2.0
"""Reads the machine code of a kernel: its instructions, and the work of a pass of each inner loop.

NVIDIA's disassembler, which Triton contains, prints the instructions of many kernels in one call,
because each call takes a third of a processor second. A loop is the code from a backward branch's
target to the branch. A loop that contains another loop is not counted, nor is a loop without matrix
products or copies if another loop has matrix products or copies. Without a counted loop, a kernel
is one pass.

    instructions   of one warp, including instructions that a predicate may skip
    barriers       for all warps of a program
    narrow_shared  loads and stores of shared memory by one or two bytes
    mufu           exponentials, reciprocals and other functions of the special unit
    matrix         matrix products by instruction and shape: {"HGMMA.64x128x16": 16}
    memory         accesses of global memory by bits per thread: {"LDGSTS.128": 16}
    shared_words   accesses of shared memory by one warp, in words of 32 x 4 bytes, without reads by
                   matrix products, and without bank conflicts"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

TOOL_SECONDS = 60
SLACK = 1.02  # a pass may have up to 2 % more instructions than before
INSTRUCTION_BYTES = 16  # the size of an instruction since compute capability 7.0
_LINE = re.compile(  # an address, a predicate, an instruction
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);",
    re.MULTILINE,
)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}  # bits; 32 without any
_MATRIX = {"HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "DMMA"}
_GLOBAL = {"LDG", "STG", "LDGSTS"}
_ENDS = {"EXIT", "RET"}


class Instruction(NamedTuple):
    opcode: str  # with modifiers, such as "LDGSTS.E.BYPASS.128"
    leads_to: int | None  # the target of a branch, as index of an instruction

    @property
    def mnemonic(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def bits(self) -> int:
        """The bits that one thread loads or stores; 32 if the opcode names no width."""
        return next((_WIDTHS[part] for part in self.opcode.split(".") if part in _WIDTHS), 32)


def disassemble(cubins: Sequence[bytes], target: int) -> list[list[Instruction]]:
    """Return the instructions of each kernel in `cubins`, which are all compiled for `target`."""
    from triton import knobs

    if not cubins:
        return []
    texts = [_text(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(texts))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-ndf", "--binary", f"SM{target}", file.name]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=TOOL_SECONDS
        )
    return read(done.stdout, [len(text) // INSTRUCTION_BYTES for text in texts])


def _text(cubin: bytes) -> bytes:
    """Return the machine code in an ELF file that contains one kernel."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, strings = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", cubin, headers + size * i) for i in range(count)]
    names = sections[strings][1]
    found = [
        cubin[offset : offset + length]
        for name, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    ]
    if len(found) != 1:
        raise ValueError(f"expected machine code of one kernel, got {len(found)} sections of it")
    return found[0]


def read(printed: str, lengths: Sequence[int]) -> list[list[Instruction]]:
    """Return the instructions of several kernels in one disassembly; `lengths` has their sizes."""
    lines = [(line["opcode"], line["operands"]) for line in _LINE.finditer(printed)]
    if len(lines) != sum(lengths):
        raise ValueError(f"expected {sum(lengths)} instructions, the disassembler has {len(lines)}")
    kernels, start = [], 0
    for length in lengths:
        kernel = []
        for opcode, operands in lines[start : start + length]:
            target = _TARGET.search(operands) if opcode.startswith("BRA") else None
            leads_to = int(target[1], 16) // INSTRUCTION_BYTES - start if target else None
            kernel.append(Instruction(opcode, leads_to))
        kernels.append(kernel)
        start += length
    return kernels


def passes(code: Sequence[Instruction]) -> list[dict[str, Any]]:
    """Return the work of one pass of each counted inner loop, in the order of the code."""
    ends: dict[int, int] = {}  # first instruction of a loop → last instruction
    for index, one in enumerate(code):
        if one.leads_to is not None and one.leads_to < index:
            ends[one.leads_to] = index
    loops = [
        code[start : end + 1]
        for start, end in sorted(ends.items())
        if not any(start <= other <= end for other in ends if other != start)
    ]
    most = max(map(_work, loops), default=0)
    if not most:
        last = max(index for index, one in enumerate(code) if one.mnemonic in _ENDS)
        return [_counts(code[: last + 1])]
    return [_counts(loop) for loop in loops if _work(loop) == most]


def _work(loop: Sequence[Instruction]) -> int:
    """Return the rank of a loop: 2 with matrix products or copies, 1 with loads or stores, or 0."""
    found = {one.mnemonic for one in loop}
    return 2 if found & {*_MATRIX, "LDGSTS"} else 1 if found & _GLOBAL else 0


def _counts(code: Sequence[Instruction]) -> dict[str, Any]:
    mnemonics = Counter(one.mnemonic for one in code)
    return {
        "instructions": len(code),
        "barriers": mnemonics["BAR"],
        "narrow_shared": sum(one.mnemonic in ("LDS", "STS") and one.bits < 32 for one in code),
        "mufu": mnemonics["MUFU"],
        "matrix": dict(
            Counter(".".join(one.opcode.split(".")[:2]) for one in code if one.mnemonic in _MATRIX)
        ),
        "memory": dict(
            Counter(f"{one.mnemonic}.{one.bits}" for one in code if one.mnemonic in _GLOBAL)
        ),
        "shared_words": sum(map(_shared_words, code)),
    }


def _shared_words(one: Instruction) -> int:
    if one.mnemonic in ("LDS", "STS", "LDGSTS"):
        return max(1, one.bits // 32)
    if one.mnemonic in ("LDSM", "STSM"):  # of so many 8 x 8 matrices of 16 bits
        return next((int(part) for part in one.opcode.split(".") if part in ("2", "4")), 1)
    return 0


def worse(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each cost of a kernel's passes that exceeds the earlier cost."""
    if len(before) != len(after):
        yield f"expected {len(before)} inner loops, got {len(after)}"
        return
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        where = f"of loop {number}"
        for name, slack in (
            ("instructions", SLACK),
            ("mufu", SLACK),
            ("barriers", 1),
            ("narrow_shared", 1),
        ):
            if new[name] > old[name] * slack:
                yield f"expected {old[name]} {name} in a pass {where}, got {new[name]}"
        if set(new["matrix"]) - set(old["matrix"]) or bool(new["matrix"]) < bool(old["matrix"]):
            yield f"expected products {old['matrix']} in a pass {where}, got {new['matrix']}"
        yield from _narrower(old["memory"], new["memory"], where)


def _narrower(old: dict[str, int], new: dict[str, int], where: str) -> Iterator[str]:
    """Yield a sentence for each kind of access that moves fewer bits in its earlier widest form."""
    for kind in sorted({key.partition(".")[0] for key in old}):
        widest = max(_bits(kind, old))
        if _carried(kind, new, widest) < _carried(kind, old, widest):
            yield f"expected {old[f'{kind}.{widest}']} {kind}.{widest} in a pass {where}, got {new}"


def _bits(kind: str, memory: dict[str, int]) -> dict[int, int]:
    """Return the number of accesses of one kind, by width in bits."""
    parts = ((*key.split("."), count) for key, count in memory.items())
    return {int(bits): count for name, bits, count in parts if name == kind}


def _carried(kind: str, memory: dict[str, int], least: int) -> int:
    """Return the total bits of the accesses of one kind that have at least `least` bits."""
    return sum(bits * count for bits, count in _bits(kind, memory).items() if bits >= least)
