# SPDX-License-Identifier: Apache-2.0
"""Builds the library of kernels/cpu/ where it can; everything else is in pyproject.toml.

It is a shared library with a C interface, not a module of Python: each source is compiled for the
processor that it is for, and the library says at run time which of them can be used. Nothing is
fetched. Without a compiler, on another processor, or where the compiler fails, the installation
goes on without it, and attention runs by torch.

KEEP_OBJECTS_IN names a folder in which what was compiled stays, and is taken again for the same
sources, flags and compiler: a build then takes a second instead of half a minute.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FOLDER = Path("kernels") / "cpu"
FILE_NAME = "libstratakv_cpu.so"  # as in kernels/cpu/library.py
FLAGS = [
    "-O2", "-std=gnu++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-ffp-contract=fast",
]  # fmt: skip
if "-g" not in os.environ.get("CFLAGS", "").split():
    # What debuggers read is nine tenths of the file, and Python's own flags ask for it.
    FLAGS.append("-g0")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
SOURCES = {
    "library.cpp": [],
    "variant_avx2.cpp": AVX2,
    # GCC 12 finds fault with its own header, once for each use.
    "variant_avx512.cpp": [
        *AVX512, "-mprefer-vector-width=512", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
    ],
}  # fmt: skip
HEADERS = (
    "attention.h", "context.h", "crew.h", "matrix.h", "network.h", "step.h", "tiles.h", "vectors.h",
)  # fmt: skip
MACHINES = ("x86_64", "amd64")
OBJECTS = "KEEP_OBJECTS_IN"
COMPILER_SECONDS = 60  # to say its version


class BuildLibrary(build_ext):
    """Compiles every source with flags of its own."""

    def get_ext_filename(self, fullname: str) -> str:
        # The library is the same for every Python.
        return str(Path(*fullname.split(".")[:-1]) / FILE_NAME)

    def run(self) -> None:
        # Whatever a compiler's absence or fault looks like, it must not end the installation.
        try:
            super().run()
        except Exception as error:  # noqa: BLE001 - the plain twins are there
            self._give_up(error)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            if platform.machine().lower() not in MACHINES:
                raise RuntimeError(f"it is written for {MACHINES[0]}, not {platform.machine()}")
            self._build(target)
        except Exception as error:  # noqa: BLE001 - the plain twins are there
            # One of an earlier build would be taken for this one.
            target.unlink(missing_ok=True)
            self._give_up(error)

    def _build(self, target: Path) -> None:
        with ThreadPoolExecutor() as compilers:
            made = [compilers.submit(self._object, name, FLAGS + SOURCES[name]) for name in SOURCES]
        objects = [each.result() for each in made]
        # Put in its place as a whole: a build that is broken off leaves nothing that is half there.
        begun = target.with_name(f"{target.name}.{os.getpid()}")
        self.compiler.link_shared_object(
            objects, str(begun), libraries=["m"], build_temp=self.build_temp, target_lang="c"
        )
        begun.replace(target)

    def _object(self, name: str, flags: list[str]) -> str:
        """The path of what a source was compiled to."""
        kept = os.environ.get(OBJECTS)
        place = Path(kept) / f"{Path(name).stem}-{self._key(name, flags)}.o" if kept else None
        if place is not None and place.exists():
            return str(place)
        (made,) = self.compiler.compile(
            [str(FOLDER / name)], output_dir=self.build_temp, extra_postargs=flags
        )
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            begun = place.with_name(f"{place.name}.{os.getpid()}")
            shutil.copyfile(made, begun)
            begun.replace(place)
        return str(made)

    def _key(self, name: str, flags: list[str]) -> str:
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
        for file in (name, *HEADERS):
            key.update(repr((file, (FOLDER / file).read_bytes())).encode())
        return key.hexdigest()[:32]

    def _give_up(self, error: Exception) -> None:
        self.warn(f"attention on the CPU will run by torch: {FILE_NAME} was not built ({error})")


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
            "stratakv.kernels.cpu.library_file",
            [str(FOLDER / name) for name in SOURCES],
            depends=[str(FOLDER / header) for header in HEADERS],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "build_py": Modules, "bdist_wheel": LibraryWheel},
)
