# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries of kernels/cpu/ and tiers/native/ where it can; everything else is in
pyproject.toml.

They are shared libraries with a C interface, not modules of Python: each source is compiled for the
processor that it is for, and the library says at run time which of them can be used. Nothing is
fetched. Without a compiler, on another processor, or where the compiler fails, the installation
goes on without them: attention runs by torch, digests by xxhash.

KEEP_OBJECTS_IN names a folder in which what was compiled stays, and is taken again for the same
sources, flags and compiler: a build then takes a second instead of half a minute.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FLAGS = [
    "-O2", "-std=gnu++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-ffp-contract=fast",
]  # fmt: skip
if "-g" not in os.environ.get("CFLAGS", "").split():
    # What debuggers read is nine tenths of the file, and Python's own flags ask for it.
    FLAGS.append("-g0")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [
    *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
    # GCC 12 finds fault with its own header, once for each use.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
]  # fmt: skip
CPU_SOURCES = {
    "library.cpp": [],
    "variant_avx2.cpp": AVX2,
    "variant_avx512.cpp": AVX512,
    "variant_avx512_bf16.cpp": [*AVX512, "-mavx512bf16"],
}  # fmt: skip
CPU_HEADERS = (
    "attention.h", "context.h", "crew.h", "experts.h", "factors.h", "layout.h", "low_rank.h",
    "matrix.h", "network.h", "parts.h", "product.h", "rows.h", "softmax.h", "step.h", "tiles.h",
    "vectors.h",
)  # fmt: skip


class Library(NamedTuple):
    """Where it lies, from what it is made, with which flags, and what is done without it."""

    folder: Path
    sources: Mapping[str, Sequence[str]]
    headers: Sequence[str]
    without: str


# The end of each name is that of the file, as in the `library.py` beside it.
LIBRARIES = {
    "stratakv.kernels.cpu.libstratakv_cpu": Library(
        Path("kernels", "cpu"), CPU_SOURCES, CPU_HEADERS, "attention on the CPU will run by torch"
    ),
    "stratakv.tiers.native.libstratakv_bytes": Library(
        Path("tiers", "native"),
        {"bytes.cpp": [], "names.cpp": []},
        (),
        "digests will be made by xxhash, keys of blocks by hashlib",
    ),
}
MACHINES = ("x86_64", "amd64")
OBJECTS = "KEEP_OBJECTS_IN"
COMPILER_SECONDS = 60  # to say its version


class BuildLibrary(build_ext):
    """Compiles every source with flags of its own."""

    def get_ext_filename(self, fullname: str) -> str:
        # The library is the same for every Python.
        return f"{Path(*fullname.split('.'))}.so"

    def run(self) -> None:
        # Whatever a compiler's absence or fault looks like, it must not end the installation.
        try:
            super().run()
        except Exception as error:  # noqa: BLE001 - the plain twins are there
            self.warn(f"nothing was compiled ({error})")

    def build_extension(self, ext: Extension) -> None:
        target, library = Path(self.get_ext_fullpath(ext.name)), LIBRARIES[ext.name]
        try:
            if platform.machine().lower() not in MACHINES:
                raise RuntimeError(f"it is written for {MACHINES[0]}, not {platform.machine()}")
            self._build(target, library)
        except Exception as error:  # noqa: BLE001 - the plain twins are there
            # One of an earlier build would be taken for this one.
            target.unlink(missing_ok=True)
            self.warn(f"{library.without}: {target.name} was not built ({error})")

    def _build(self, target: Path, library: Library) -> None:
        with ThreadPoolExecutor() as compilers:
            made = [
                compilers.submit(self._object, library, name, [*FLAGS, *flags])
                for name, flags in library.sources.items()
            ]
        objects = [each.result() for each in made]
        # Put in its place as a whole: a build that is broken off leaves nothing that is half there.
        begun = target.with_name(f"{target.name}.{os.getpid()}")
        self.compiler.link_shared_object(
            objects, str(begun), libraries=["m"], build_temp=self.build_temp, target_lang="c"
        )
        begun.replace(target)

    def _object(self, library: Library, name: str, flags: list[str]) -> str:
        """The path of what a source was compiled to."""
        kept = os.environ.get(OBJECTS)
        key = self._key(library, name, flags)
        place = Path(kept) / f"{Path(name).stem}-{key}.o" if kept else None
        if place is not None and place.exists():
            return str(place)
        (made,) = self.compiler.compile(
            [str(library.folder / name)], output_dir=self.build_temp, extra_postargs=flags
        )
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            begun = place.with_name(f"{place.name}.{os.getpid()}")
            shutil.copyfile(made, begun)
            begun.replace(place)
        return str(made)

    def _key(self, library: Library, name: str, flags: list[str]) -> str:
        """Changes with whatever can change what `name` is compiled to."""
        commands = [getattr(self.compiler, key) for key in sorted(self.compiler.executables)]
        programs = sorted({self.compiler.compiler_so[0], self.compiler.compiler_so_cxx[0]})
        versions = [
            subprocess.run(
                [program, "--version"], capture_output=True, check=True, timeout=COMPILER_SECONDS
            ).stdout
            for program in programs
        ]
        key = hashlib.sha256(repr((commands, versions, flags)).encode())
        for file in (name, *library.headers):
            key.update(repr((file, (library.folder / file).read_bytes())).encode())
        return key.hexdigest()[:32]


class Modules(build_py):
    """The root is a package, of which this file is no part."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[1] != "setup"]


class LibraryWheel(bdist_wheel):
    """A wheel for every Python of a platform."""

    def get_tag(self) -> tuple[Any, Any, Any]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            name,
            [str(library.folder / source) for source in library.sources],
            depends=[str(library.folder / header) for header in library.headers],
            optional=True,
        )
        for name, library in LIBRARIES.items()
    ],
    cmdclass={"build_ext": BuildLibrary, "build_py": Modules, "bdist_wheel": LibraryWheel},
)
