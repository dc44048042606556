#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the dependencies of pyproject.toml with uv into the environment of the running Python.

`make` runs the tool before pip, so that pip finds all dependencies and installs only the project.
uv takes a quarter of pip's processor time and uses pip's configured indexes. If uv fails, the tool
prints the reason and exits with status 1, and pip installs everything. The arguments are extras:
`python tools/install_dependencies.py EXTRA...`. With `--into FOLDER REQUIREMENT` the tool installs
only REQUIREMENT, into FOLDER."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
SECONDS = 900
# pip's option → uv's environment variable, and the separator of several values.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def requirements(extras: Sequence[str], project: dict[str, object]) -> Iterator[str]:
    """Yield the requirements of the project and of `extras`; an extra may include other extras."""
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    listed = [project["dependencies"], *(optional[extra] for extra in extras)]
    for one in (each for part in listed for each in part):
        if own := re.fullmatch(rf"{project['name']}\[(.*)\]", one):
            yield from requirements(own[1].split(","), {**project, "dependencies": []})
        else:
            yield one


def settings(listed: str) -> dict[str, str]:
    """Return uv's environment variables for the settings in `listed`, the output of `pip config
    list`. As in pip, values of later sections replace values of earlier sections."""
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            name, join = SETTINGS.get(key.removeprefix(section), ("", ""))
            if name and key.startswith(section):
                found[name] = join.join(value.strip("'\"").split())
    return found


def wanted(words: Sequence[str]) -> list[str]:
    """Return the arguments of `uv pip install`: the requirements and the target."""
    if words[:1] == ["--into"]:
        return ["--no-deps", "--target", *words[1:]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ["--constraints", str(ROOT / "constraints.txt"), *requirements(words, project)]


def has_uv() -> bool:
    try:
        return f"uv=={metadata.version('uv')}" == UV
    except metadata.PackageNotFoundError:
        return False


def main() -> int:
    pip = [sys.executable, "-P", "-m", "pip"]
    try:
        told = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True)
        if not has_uv():
            subprocess.run([*pip, "install", "--quiet", UV], check=True, timeout=SECONDS)
        subprocess.run(
            [
                *(sys.executable, "-P", "-m", "uv", "pip", "install", "--quiet"),
                *("--python", sys.executable, "--no-config"),
                *wanted(sys.argv[1:]),
            ],
            check=True,
            timeout=SECONDS,
            env={**settings(told.stdout), **os.environ},
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"pip installs everything, which takes longer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
