# SPDX-License-Identifier: Apache-2.0
"""The package is what pyproject.toml says, and its lower floors run on the base install.

The root of the repository is the package, so a forgotten line in the list of packages, or a module
dropped at the root, would go unnoticed until somebody installs a wheel.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stratakv
from stratakv.engine.config.optional_packages import explain_missing_module

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PACKAGES: list[str] = SETUPTOOLS["packages"]
TOP_FOLDERS = ("benchmarks", "connector", "engine", "kernels", "proto", "tiers")
BASE_INSTALL_LIMIT_BYTES = 100_000_000
HEAVY = ("torch", "triton", "cupy", "numpy")

# Runs in a fresh interpreter: refuses the named packages, then imports every named module.
IMPORT_WITHOUT = """
import importlib, sys
blocked, names = sys.argv[1].split(","), sys.argv[2].split(",")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocker())
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def _folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def _modules_under(*folders: str) -> list[str]:
    """Dotted names of every module in these folders, packages included."""
    names = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            names.append(".".join(("stratakv", *parts)))
    return names


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd="/",  # from anywhere but the repository
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_packages_are_the_folders_with_an_init() -> None:
    found = {"stratakv"}
    for top in TOP_FOLDERS:
        for path in (ROOT / top).rglob("__init__.py"):
            found.add(".".join(("stratakv", *path.relative_to(ROOT).parent.parts)))
    assert sorted(found) == sorted(PACKAGES)


def test_no_module_lies_in_a_folder_that_is_no_package() -> None:
    for top in TOP_FOLDERS:
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.relative_to(ROOT)


def test_the_root_holds_no_other_module() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "setup.py"]


def test_every_package_says_what_it_is() -> None:
    for package in PACKAGES:
        text = (_folder_of(package) / "__init__.py").read_text()
        assert re.match(r'# SPDX-License-Identifier: Apache-2\.0\n"""\S', text), package


# What benchmarks found belongs to the repository; nothing that is installed reads it.
RESULTS = ROOT / "benchmarks" / "results"


def test_every_data_file_is_packaged() -> None:
    """A file that is not Python and lies in a package must match a pattern, or no wheel has it; but
    for the library, which each installation builds."""
    patterns: dict[str, list[str]] = SETUPTOOLS["package-data"]
    for package in PACKAGES[1:]:
        folder = _folder_of(package)
        for path in folder.rglob("*"):
            inner = path.relative_to(folder)
            in_subpackage = any(
                (folder / parent / "__init__.py").exists() for parent in list(inner.parents)[:-1]
            )
            if path.is_dir() or in_subpackage or path.suffix in (".py", ".pyc", ".so"):
                continue
            if RESULTS in path.parents:
                continue
            wanted = [*patterns["*"], *patterns.get(package, [])]
            matches = [
                p
                for p in wanted
                if fnmatch.fnmatch(str(inner), p) and p.count("/") == str(inner).count("/")
            ]
            assert matches, f"{path.relative_to(ROOT)} is in no wheel: see package-data"


def test_version_is_the_same_everywhere() -> None:
    assert stratakv.__version__ == PYPROJECT["project"]["version"]


def test_import_brings_nothing_heavy() -> None:
    code = f"import stratakv, sys; print([n for n in {HEAVY!r} if n in sys.modules])"
    assert _run(code) == "[]"


def test_the_python_api_is_at_the_root_and_loaded_when_it_is_used() -> None:
    code = """
import sys
import stratakv
assert {"LLM", "RequestOutput", "SamplingParams"} <= set(dir(stratakv))
assert "stratakv.engine" not in sys.modules
from stratakv import LLM, RequestOutput, SamplingParams
from stratakv import engine
print(all(getattr(engine, each.__name__) is each for each in (LLM, RequestOutput, SamplingParams)))
"""
    assert _run(code) == "True"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(stratakv, "no_such_name")
    with pytest.raises(ImportError, match="no_such_name"):
        from stratakv import no_such_name  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("name", ["LLM", "SamplingParams"])
def test_the_python_api_of_a_base_install_says_what_to_install(name: str) -> None:
    """Without the engine's packages: which package is missing, and the command that installs it."""
    engine_extra = "torch,numpy,tokenizers,safetensors,zmq,fastapi,jinja2,pydantic"
    code = (
        IMPORT_WITHOUT.replace("importlib.import_module(name)", "pass")
        + f"""
try:
    from stratakv import {name}
except ImportError as error:
    print(error)
else:
    print("imported")
"""
    )
    said = _run(code, engine_extra, "-").splitlines()[-1]
    # `SamplingParams` needs none of these.
    assert said == "imported" if name == "SamplingParams" else "pip install '.[engine]'" in said


def test_a_missing_package_of_an_extra_is_told_with_its_extra() -> None:
    """Whatever a base install lacks and a module imports; peers say themselves what they lack."""
    base = _installed_closure(PYPROJECT["project"]["dependencies"])
    packages = importlib.metadata.packages_distributions()
    peers = {"lmcache", "mooncake", "sglang", "vllm", "zstandard"}
    missing = set()
    for folder in TOP_FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    missing |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    missing.add((node.module or "").partition(".")[0])
    missing -= sys.stdlib_module_names | {"stratakv", "google"} | peers
    missing = {
        name
        for name in missing
        if not {each.lower().replace("_", "-") for each in packages.get(name, ())} & base.keys()
    }
    assert {"torch", "h11", "cupy"} <= missing
    for name in missing:
        said = explain_missing_module(ModuleNotFoundError(f"No module named {name!r}", name=name))
        assert "pip install" in said, f"engine/config/optional_packages.py does not know {name}"


def test_lower_floors_import_without_torch_and_numpy() -> None:
    names = _modules_under("tiers", "proto")
    assert "stratakv.tiers" in names
    assert _run(IMPORT_WITHOUT, ",".join(HEAVY), ",".join(names)) == str(len(names))


@pytest.mark.slow
def test_every_module_imports_without_gpu_packages() -> None:
    # Those named after triton hold its kernels, and are imported when one of them is asked for; the
    # others are for hosts that are not installed.
    left_out = (
        "__main__", "_triton", "lmcache.adapter", "sglang.storage", "vllm.spec", "vllm.tier",
        "vllm.worker", "kv_connector.connector", "kv_connector.stats", "vllm.peer_spec",
    )  # fmt: skip
    names = [name for name in _modules_under(*TOP_FOLDERS) if not name.endswith(left_out)]
    assert _run(IMPORT_WITHOUT, "triton,cupy", ",".join(names)) == str(len(names))


def _installed_closure(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """What these requirements install, extras left out, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        if re.search(r";.*\bextra\b", requirement):
            continue
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # asked for on another platform or Python only
        queue += found[name].requires or []
    return found


def test_base_install_is_small() -> None:
    closure = _installed_closure(PYPROJECT["project"]["dependencies"])
    assert not set(HEAVY) & set(closure)
    sizes = {
        name: sum(file.size or 0 for file in distribution.files or [])
        for name, distribution in closure.items()
    }
    assert sum(sizes.values()) < BASE_INSTALL_LIMIT_BYTES, sizes


def test_constraints_hold_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: {line} names no exact version"
            pinned[name.lower().replace("_", "-")] = version
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"]]
    wanted += [line for extra in ("engine", "bench", "test") for line in extras[extra]]
    for requirement in wanted:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        assert name == "stratakv" or name in pinned, f"{name} is not in constraints.txt"


# What others import, or name in a configuration: it keeps its path until a version says otherwise.
ENTRANCES = {
    "stratakv": ("LLM", "SamplingParams", "StructuredOutputsParams", "RequestOutput"),
    "stratakv.connector.vllm": ("StrataSpec", "StrataTier", "StrataConnector"),
    "stratakv.connector.lmcache": ("StrataL2Adapter",),
    "stratakv.connector.sglang": ("StrataHiCacheStorage",),
    "stratakv.engine.sampling.processors.adapter": ("AdapterLogitsProcessor",),
    "stratakv.engine.sampling.processors.base": ("StatefulProcessor", "ban", "drafted"),
    "stratakv.engine.scheduler.policies": ("SchedulingPolicy",),
    "stratakv.tiers.base": ("Answer", "Stored", "StoreTier", "TierStats"),
    "stratakv.tiers.block": ("BlockLayout",),
    "stratakv.tiers.contract": ("check_store_contract",),
    "stratakv.tiers.errors": ("InvalidBlock", "TierBusy", "TierClosed", "TierConfigError"),
    "stratakv.tiers.policies.base": ("EvictionPolicy",),
    "stratakv.tiers.policies.contract": ("check_policy_contract",),
    "stratakv.tiers.record": ("HEADER_BYTES", "RecordHeader", "encode_header", "verify_record"),
    "stratakv.tiers.tag": ("Tagger", "payload_digest"),
}


@pytest.mark.parametrize("module", ENTRANCES)
def test_what_others_import_keeps_its_path(module: str) -> None:
    found = importlib.import_module(module)
    offered = {*dir(found), *getattr(found, "__all__", ())}
    assert set(ENTRANCES[module]) <= offered


def test_the_tutorials_import_nothing_else() -> None:
    pages = [*(ROOT / "docs" / "tutorials").glob("*.md"), ROOT / "docs" / "logits-processors.md"]
    named = re.findall(r"from (stratakv[.\w]*) import", "".join(p.read_text() for p in pages))
    assert named and set(named) <= ENTRANCES.keys()
