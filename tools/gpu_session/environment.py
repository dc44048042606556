# SPDX-License-Identifier: Apache-2.0
"""The environment of the commands of `tools/on_gpu.py`: path, carried wheels, commit, GPU.

Nothing is installed: the Python path contains this checkout of StrataKV, and a temporary folder
into which wheels of missing packages are unpacked."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .steps import ROOT

# Modules that StrataKV needs and that a machine with torch and a GPU may lack. Wheels of the
# CARRIED are required; GPU tests and benchmarks run without the modules NOT_THERE.
CARRIED = ("cbor2", "lmdb", "msgspec", "zmq")
NOT_THERE = (
    "check_jsonschema", "fastapi", "grpc_health", "grpc_reflection", "grpc_tools",
    "kubernetes_validate", "llguidance", "openai", "pydantic", "starlette", "trustme", "uvicorn",
    "xgrammar", "zstandard",
)  # fmt: skip
# The variable with the commit of a checkout without .git; benchmarks/harness/report.py reads it.
COMMIT_VARIABLE = "STRATAKV_COMMIT"
_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/-]{0,63}")


class WrongUse(Exception):
    """The step cannot begin; the message says how to fix the call or the machine."""


def prepare(
    work: Path, wheels: Path | None, *, is_rehearsal: bool, commit: str = ""
) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables of a command, and the wheels on its Python path."""
    names = work / "names"
    names.mkdir()
    (names / "stratakv").symlink_to(ROOT, target_is_directory=True)
    path = [str(names)]
    carried: list[str] = []
    if wheels is not None:
        (work / "site").mkdir()
        carried = unpack_wheels(wheels, work / "site")
        path.append(str(work / "site"))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    environment.pop(COMMIT_VARIABLE, None)
    if commit:
        environment[COMMIT_VARIABLE] = commit
    if is_rehearsal:
        hide = work / "hide"
        hide.mkdir()
        (hide / "sitecustomize.py").write_text(HIDING.format(names=sorted(NOT_THERE)))
        path.insert(0, str(hide))
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        environment["TRITON_INTERPRET"] = "0"
    before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, *before])
    return environment, carried


def unpack_wheels(folder: Path, target: Path) -> list[str]:
    """Unpack every wheel of `folder` into `target`; return their names. Raises WrongUse for a wheel
    of another Python or processor, for two wheels of a package, and for a file that is no wheel."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.whl")):
        name, _, rest = path.name.partition("-")
        if name in found:
            raise WrongUse(f"{folder} has {found[name]} and {path.name}; keep one of them")
        if not fits(rest):
            raise WrongUse(
                f"{path.name} is not for this machine, which has Python "
                f"{platform.python_version()} on {platform.machine()}; docs/gpu.md has the command "
                "that downloads the right one"
            )
        try:
            with zipfile.ZipFile(path) as wheel:
                check_names(path, wheel.namelist())
                for member in wheel.infolist():
                    wheel.extract(member, target)
        except (zipfile.BadZipFile, OSError) as error:
            raise WrongUse(f"{path} cannot be unpacked ({error}); carry it again") from error
        found[name] = path.name
    if not found:
        raise WrongUse(f"--wheels {folder} has no file that ends in .whl")
    return list(found.values())


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise WrongUse for a file name that is outside of the target folder."""
    for name in names:
        if name.startswith("/") or ".." in Path(name).parts:
            raise WrongUse(f"{path} has a file {name!r}, which no wheel has; it is not unpacked")


def fits(rest: str) -> bool:
    """Whether a wheel runs on this machine; `rest` is VERSION-PYTHON-ABI-PLATFORM of its name."""
    words = rest.removesuffix(".whl").split("-")[-3:]
    if len(words) != 3:
        return False
    pythons, abi, platforms = words
    if abi == "none" and platforms == "any":
        return "py3" in pythons.split(".")
    minor = sys.version_info.minor
    built_for = {int(n) for n in re.findall(r"cp3(\d+)", pythons)}
    is_python = minor in built_for or (abi == "abi3" and any(n <= minor for n in built_for))
    is_python = is_python or "py3" in pythons.split(".")
    return is_python and platform.machine() in platforms


# A rehearsal hides packages, so that an import fails as on a machine without these packages. The
# finder for files is replaced, because a finder that raises would also make `find_spec` fail.
HIDING = '''\
"""Written by tools/on_gpu.py: hides packages that a machine with a GPU has not got."""
import sys
from importlib.machinery import PathFinder
HIDDEN = frozenset({names!r})
class Hiding:
    find_distributions = PathFinder.find_distributions
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        return None if top in HIDDEN else PathFinder.find_spec(name, path, target)
sys.meta_path = [Hiding if each is PathFinder else each for each in sys.meta_path]
'''


def check_modules(environment: dict[str, str]) -> None:
    """Raise WrongUse if a module of CARRIED is missing."""
    looks = f"import importlib.util as u; print([n for n in {CARRIED!r} if not u.find_spec(n)])"
    missing = json.loads(ask_python(looks, environment).replace("'", '"'))
    if missing:
        raise WrongUse(
            f"this Python has no {', '.join(missing)}; carry the wheels (docs/gpu.md has the "
            "command that downloads them) and name their folder with --wheels"
        )


def bench_sections(environment: dict[str, str]) -> list[str]:
    """Return the names of the sections of `stratakv bench gpu`. Raises WrongUse."""
    looks = "import json; from stratakv.benchmarks.gpu import NAMES; print(json.dumps(NAMES))"
    names: list[str] = json.loads(ask_python(looks, environment))
    return names


def check_gpu(environment: dict[str, str]) -> str:
    """Return the GPU's name. Raises WrongUse if torch finds no GPU."""
    looks = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = ask_python(looks, environment)
    if not name:
        raise WrongUse(
            "torch sees no CUDA device here; look at nvidia-smi and at torch.version.cuda, or try "
            "the steps themselves with --rehearse"
        )
    return name


def ask_python(code: str, environment: dict[str, str]) -> str:
    """Run Python code in a process; return its output. Raises WrongUse if the code fails."""
    words = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired as error:
        raise WrongUse(f"{sys.executable} did not answer in 120 s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise WrongUse(f"{sys.executable} cannot do what every step needs: {last}")
    return done.stdout.strip()


def find_commit(given: str | None) -> str:
    """Return the commit of this checkout: `given`, or the commit that git reports, or "". Raises
    WrongUse if `given` is no name of a commit."""
    if given is not None:
        if not _COMMIT.fullmatch(given):
            raise WrongUse(
                f"--commit takes a commit as `git describe --always` prints it, not {given!r}"
            )
        return given
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def machine(environment: dict[str, str], *, is_rehearsal: bool) -> dict[str, Any]:
    """Return properties of the machine and the commit, without any host name or user name."""
    return {
        "device": "none: a rehearsal" if is_rehearsal else check_gpu(environment),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "commit": environment.get(COMMIT_VARIABLE, ""),
    }
