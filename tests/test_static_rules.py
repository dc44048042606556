# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for the text of the code: no unsafe loading, no upward import, a licence line.

They are read from the syntax tree, so a name in a string or a comment breaks nothing. Every
exception is a row of a table here, with its reason; a row that no longer applies fails too.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDERS = ("benchmarks", "connector", "engine", "kernels", "proto", "tiers")
FOLDERS = (*PACKAGE_FOLDERS, "tests", "tools", "deploy")
SPDX = "SPDX-License-Identifier: Apache-2.0"

# Loading one of these runs code that the data names.
BANNED_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# path -> why it writes pickle; reading stays forbidden there too.
WRITES_PICKLE = {"benchmarks/core/hash_peers.py": "times block hashing as the peer does it"}
BANNED_CALLS = {
    "torch.load": "reads pickle; use safetensors",
    "torch.serialization.load": "reads pickle; use safetensors",
    "yaml.load": "builds any object; use yaml.safe_load",
    "yaml.load_all": "builds any object; use yaml.safe_load_all",
    "yaml.unsafe_load": "builds any object; use yaml.safe_load",
    "yaml.full_load": "builds more than plain values; use yaml.safe_load",
    "eval": "runs text as code",
    "exec": "runs text as code",
    "os.system": "runs text as a shell command",
}
# Methods that pickle, whatever the object is called: of pyzmq's sockets, of pandas.
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"}
BANNED_TRUE_KEYWORDS = {
    "allow_pickle": "numpy would read pickle",
    "trust_remote_code": "transformers would run a repository's code",
    "shell": "subprocess would run text as a shell command",
}

# Wall-clock time jumps. It may be shown to people, and decides nothing: leases, time-outs and ages
# use time.monotonic(). path -> what the wall clock is for there.
WALL_CLOCK: dict[str, str] = {
    "tiers/identity/file_digests.py": "compared with a file's ctime, which is of the same clock: a "
    "young one is hashed again at the next start",
    "tiers/cache_server/server_metrics.py": "the moment of the start, which scrapers compare "
    "with theirs",
    "engine/api/metrics/core_metrics.py": "the moment of a scrape, by which gateways find the "
    "newest of several",
}

# Only this file writes the command line of a Python: without -P, a file in the working directory
# takes the place of a package.
PYTHON_COMMAND = "tiers/processes/python_command.py"
SAFE_PATH = ("-P", "-I")
# path -> how the process it starts keeps the working directory away otherwise.
OLDER_PYTHON = {"engine/cli/checks/python.py": "probe.py takes it from the path, also before 3.11"}
# Of the standard library: they start `python -c`, or a program in place of this one.
STARTS_OTHERS = {
    *(f"multiprocessing.{name}" for name in ("get_context", "set_start_method", "set_executable")),
    *(f"multiprocessing.{name}" for name in ("Process", "Pool", "Manager")),
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.process.ProcessPoolExecutor",
}
STARTS_OTHERS_BEGIN = ("os.exec", "os.spawn", "os.posix_spawn", "multiprocessing.context.")

# folder -> the folders it may import. The longest matching prefix decides.
MAY_IMPORT: dict[str, set[str]] = {
    "proto": set(),
    "kernels": {"kernels"},
    "tiers": {"tiers", "proto"},
    "connector": {"connector", "tiers", "kernels", "proto"},
    "connector/vllm": {"connector", "tiers", "proto"},
    "engine": {"engine", "connector", "tiers", "kernels", "proto"},
    "engine/cli": {"engine", "connector", "tiers", "kernels", "proto", "benchmarks"},
    "benchmarks": {"benchmarks", "engine", "connector", "tiers", "kernels", "proto"},
}
# folder -> what nothing below it imports, not even inside a function.
NEVER_IMPORTS: dict[str, set[str]] = {
    "proto": {"torch", "numpy", "triton", "cupy"},
    "tiers": {"torch", "triton", "cupy"},
    "engine/scheduler": {"torch", "stratakv.engine.api", "stratakv.engine.cli"},
    "engine/sampling": {
        "stratakv.engine.worker",
        "stratakv.engine.scheduler",
        "stratakv.engine.api",
        "stratakv.engine.cli",
    },
    "tiers/cache_server": {"torch", "triton", "cupy", "stratakv.tiers.remote"},
    "tiers/wire": {
        "torch",
        "triton",
        "cupy",
        "stratakv.tiers.remote",
        "stratakv.tiers.cache_server",
    },
    "engine/models": {"stratakv.engine.api", "stratakv.engine.cli"},
    "engine/worker": {"stratakv.engine.api", "stratakv.engine.cli"},
    "engine/api": {"stratakv.engine.worker"},
}
# Modules that may be imported at the top of a file only below these folders: elsewhere the import
# stands inside the function that needs it, so that importing stratakv never asks for a GPU.
LAZY = {"triton": ("kernels",), "cupy": ()}


@cache
def sources() -> tuple[Path, ...]:
    return tuple(
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@cache
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of it: several rules look at all of them."""
    return tuple(ast.walk(tree))


@pytest.fixture(autouse=True, scope="module")
def _no_collection_of_garbage() -> Iterator[None]:
    """Reading a thousand trees would be four times the work: nothing of them becomes garbage."""
    gc.disable()
    yield
    _tree.cache_clear()
    _nodes.cache_clear()
    gc.enable()


def _in(path: Path, folder: str) -> bool:
    return path.as_posix().startswith(folder + "/")


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or an attribute, `` of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def imports_of(path: Path) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    """Every module that a file imports, relative imports resolved, with the statement."""
    package = ("stratakv", *path.parts[:-1])
    for node in _nodes(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join((*base, *([node.module] if node.module else [])))
            else:
                module = node.module or ""
            # `from .. import tiers` imports a folder, `from .block import Key` a name: both forms
            # are given, and the rules look at prefixes.
            yield module, node
            for alias in node.names:
                yield f"{module}.{alias.name}", node


def _starts_with(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _aliases(path: Path) -> dict[str, str]:
    """What modules are called in a file that gives them other names."""
    return {
        alias.asname: alias.name
        for node in _nodes(_tree(path))
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }


def _plain(name: str) -> str:
    """The name of a builtin without its module."""
    return name.removeprefix("builtins.")


def _unsafe(path: Path) -> Iterator[str]:
    """What this file does that can run code out of data, one sentence each."""
    writes_pickle = path.as_posix() in WRITES_PICKLE
    for module, node in imports_of(path):
        if writes_pickle and module == "pickle":
            continue
        if module.partition(".")[0] in BANNED_MODULES or _plain(module) in BANNED_CALLS:
            yield f"{path}:{node.lineno}: imports {module}"
    aliases = _aliases(path)
    for call in _nodes(_tree(path)):
        if not isinstance(call, ast.Call):
            continue
        head, dot, rest = _dotted(call.func).partition(".")
        name = _plain(aliases.get(head, head) + dot + rest)
        if name in ("__import__", "importlib.import_module"):
            for argument in call.args[:1]:
                module = argument.value if isinstance(argument, ast.Constant) else ""
                if isinstance(module, str) and module.partition(".")[0] in BANNED_MODULES:
                    yield f"{path}:{call.lineno}: imports {module}"
        if name.startswith("pickle.") and name != "pickle.dumps":
            yield f"{path}:{call.lineno}: {name}: runs code that the data names"
        if name in BANNED_CALLS:
            yield f"{path}:{call.lineno}: {name}: {BANNED_CALLS[name]}"
        if isinstance(call.func, ast.Attribute) and call.func.attr in BANNED_METHODS:
            yield f"{path}:{call.lineno}: {call.func.attr}: pickles what it carries"
        for keyword in call.keywords:
            literal = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in BANNED_TRUE_KEYWORDS and not literal:
                reason = BANNED_TRUE_KEYWORDS[keyword.arg]
                yield f"{path}:{call.lineno}: {keyword.arg}: {reason}"


def _launches(path: Path) -> Iterator[str]:
    """Processes that it starts with the working directory on their path, one sentence each."""
    if path.as_posix() == PYTHON_COMMAND:
        return
    is_ours, aliases = path.parts[0] in PACKAGE_FOLDERS, _aliases(path)
    for node in _nodes(_tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in _nodes(_tree(path)):
        if isinstance(node, ast.Call):
            head, dot, rest = _dotted(node.func).partition(".")
            name = aliases.get(head, head) + dot + rest
            if name in STARTS_OTHERS or name.startswith(STARTS_OTHERS_BEGIN):
                yield f"{path}:{node.lineno}: {name}: use spawn_context or python_command"
        if is_ours and isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None and _dotted(node.value) == "sys.executable":
                yield f"{path}:{node.lineno}: a Python to be started: use python_command"
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        words = [each.value if isinstance(each, ast.Constant) else each for each in node.elts]
        for place, word in enumerate(words):
            behind = words[place + 1] if place + 1 < len(words) else ""
            if isinstance(word, ast.expr) and _dotted(word) == "sys.executable":
                is_flag = place and str(words[place - 1]).startswith("--")
                is_script = str(behind).endswith(".py") or (
                    isinstance(behind, ast.expr) and _dotted(behind) == "__file__"
                )
                if is_ours or not (is_flag or is_script or behind in SAFE_PATH):
                    yield f"{path}:{node.lineno}: starts a Python: use python_command"
        first = next((i for i, word in enumerate(words) if word in ("-m", "-c")), 0)
        # Words that begin so are for somebody who writes what comes before them.
        if first and not isinstance(words[0], str) and path.as_posix() not in OLDER_PYTHON:
            if not set(SAFE_PATH) & {word for word in words[:first] if isinstance(word, str)}:
                yield f"{path}:{node.lineno}: {words[first]} without -P: use python_command"


def test_y02_no_process_imports_from_the_folder_it_is_started_in() -> None:
    own = [path for path in sources() if path.parts[0] != "tests"]
    assert [finding for path in own for finding in _launches(path)] == []


def test_y02_a_python_that_may_be_older_is_started_where_listed() -> None:
    for path in OLDER_PYTHON:
        found = [w for w in _nodes(_tree(Path(path))) if isinstance(w, ast.List)]
        assert any("-c" in [getattr(e, "value", "") for e in each.elts] for each in found), path


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("import sys\n[sys.executable, '-m', 'a']", "tiers/a.py"),
        ("import sys\n[sys.executable, '-P', '-m', 'a']", "tiers/a.py"),  # not by the function
        ("import sys\n('nice', sys.executable, *words)", "benchmarks/a.py"),
        ("import sys\npython = sys.executable\n[python, '-P', '-m', 'a']", "engine/a.py"),
        ("[python, '-c', code]", "engine/a.py"),
        ("import sys\n[sys.executable, '-c', code]", "tools/a.py"),
        ("import sys\n[sys.executable, *words]", "tools/a.py"),
        ("import multiprocessing\nmultiprocessing.get_context('spawn')", "benchmarks/a.py"),
        ("import multiprocessing as m\nm.Process(target=f)", "engine/a.py"),
        ("from multiprocessing import Pool\nPool(2)", "benchmarks/a.py"),
        ("from concurrent.futures import ProcessPoolExecutor as P\nP()", "engine/a.py"),
        ("import os\nos.execv(a, b)", "engine/a.py"),
    ],
)
def test_y02_the_rule_of_launches_sees_each_form(
    code: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert list(_launches(Path(place)))


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("python_command('-m', 'a')", "tiers/a.py"),
        ("['-m', 'a']", "benchmarks/a.py"),
        ("['git', '-c', 'a=b']", "tools/a.py"),
        ("import sys\n[sys.executable, '-P', '-m', 'a']", "tools/a.py"),
        ("import sys\n[sys.executable, __file__]", "tools/a.py"),
        ("import sys\n['--python', sys.executable]", "tools/a.py"),
    ],
)
def test_y02_the_rule_of_launches_leaves_the_rest_alone(
    code: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert not list(_launches(Path(place)))


def test_there_is_something_to_look_at() -> None:
    assert {path.parts[0] for path in sources()} >= {*PACKAGE_FOLDERS, "tests", "tools"}


def test_nothing_can_run_code_out_of_data() -> None:
    assert [finding for path in sources() for finding in _unsafe(path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "from yaml import load",
        "import torch as t\nt.load('x')",
        "import torch\ntorch.serialization.load('x')",
        "import marshal",
        "import shelve",
        "from dill import loads",
        "import cloudpickle.cloudpickle",
        "importlib.import_module('pickle')",
        "__import__('_pickle')",
        "pandas.read_pickle('x')",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
        "from builtins import exec",
        "socket.recv_pyobj()",
        "model(trust_remote_code=flag)",
    ],
)
def test_the_unsafe_rule_sees_each_form(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert list(_unsafe(Path("tiers/example.py")))


@pytest.mark.parametrize(
    "code", ["import pickle\npickle.loads(x)", "from pickle import loads", "import _pickle"]
)
def test_a_file_that_may_write_pickle_may_not_read_it(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert all(list(_unsafe(Path(path))) for path in WRITES_PICKLE)


def test_files_that_may_write_pickle_do() -> None:
    for path in WRITES_PICKLE:
        assert "pickle" in [module for module, _ in imports_of(Path(path))], path


@pytest.mark.parametrize("code", ["model.eval()", "np.load(p, allow_pickle=False)", "'pickle'"])
def test_the_unsafe_rule_leaves_the_rest_alone(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert not list(_unsafe(Path("tiers/example.py")))


def test_wall_clock_is_read_only_where_listed() -> None:
    readers: dict[str, int] = {}
    clocks = ("time.time", "time.time_ns")
    for path in sources():
        if path.parts[0] not in PACKAGE_FOLDERS:
            continue
        for call in _nodes(_tree(path)):
            if isinstance(call, ast.Call) and _dotted(call.func) in clocks:
                readers.setdefault(path.as_posix(), call.lineno)
        for module, node in imports_of(path):
            if module in clocks:
                readers.setdefault(path.as_posix(), node.lineno)
    unlisted = {path: line for path, line in readers.items() if path not in WALL_CLOCK}
    assert not unlisted, "use time.monotonic(), or add a row with a reason to WALL_CLOCK"
    assert set(WALL_CLOCK) <= set(readers), "a row of WALL_CLOCK no longer applies"


def _upward(path: Path) -> Iterator[str]:
    """Imports of a folder that this file may not know of, one sentence each."""
    allowed = MAY_IMPORT[max((name for name in MAY_IMPORT if _in(path, name)), key=len)]
    for module, node in imports_of(path):
        parts = module.split(".")
        if parts[0] != "stratakv" or len(parts) < 2 or parts[1] not in PACKAGE_FOLDERS:
            continue
        own_generated = parts[1] == "proto" and _in(path, "proto")
        if parts[1] not in allowed and not own_generated:
            yield f"{path}:{node.lineno}: imports {module}"


def test_arrows_run_down() -> None:
    """A floor imports the floors below it and never one above."""
    paths = [path for path in sources() if path.parts[0] in PACKAGE_FOLDERS]
    assert [finding for path in paths for finding in _upward(path)] == []


# What stands below everything with options imports none of it, and the table of the
# engine's options is below what reads them from flags, environment and files.
BELOW = (
    ("tiers/settings", "stratakv.tiers", "stratakv.tiers.settings"),
    *(
        (f"engine/config/{options}.py", f"stratakv.engine.config.{reader}", None)
        for options in ("engine_options", "offload_config", "engine_config")
        for reader in ("schema", "resolve", "environment", "vllm_aliases", "server_options")
    ),
)


def _back_up(path: Path) -> Iterator[str]:
    for place, refused, except_below in BELOW:
        if path.as_posix() != place and not _in(path, place):
            continue
        for module, node in imports_of(path):
            allowed = except_below and _starts_with(module, except_below)
            if _starts_with(module, refused) and not allowed and module != "stratakv.tiers":
                yield f"{path}:{node.lineno}: imports {module}"


def test_settings_stand_below_what_has_options() -> None:
    assert [finding for path in sources() for finding in _back_up(path)] == []
    for place, _, _ in BELOW:
        assert (ROOT / place).exists()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("tiers/settings/example.py", "from ..block import BlockLayout"),
        ("tiers/settings/example.py", "from .. import block"),
        ("engine/config/engine_options.py", "from .resolve import read_config_settings"),
        ("engine/config/engine_config.py", "def f():\n    from .schema import Layer"),
    ],
)
def test_the_rule_of_settings_sees_each_form(
    path: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert list(_back_up(Path(path)))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("tiers/example.py", "from ..connector.base import KVConnector"),
        ("tiers/example.py", "from .. import engine"),
        ("tiers/policies/example.py", "from ...engine import config"),
        ("tiers/example.py", "def f():\n    import stratakv.engine.config.engine_config"),
        ("connector/example.py", "from ..engine.config import EngineConfig"),
        ("engine/api/example.py", "from ...benchmarks import report"),
        ("kernels/example.py", "from ..tiers.block import BlockLayout"),
    ],
)
def test_the_arrow_rule_sees_each_form(
    path: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_tree", lambda path: ast.parse(code))
    assert list(_upward(Path(path)))


def test_folders_keep_what_they_promise_not_to_import() -> None:
    wrong = []
    for path in sources():
        for folder, banned in NEVER_IMPORTS.items():
            if not _in(path, folder):
                continue
            for module, node in imports_of(path):
                if any(_starts_with(module, name) for name in banned):
                    wrong.append(f"{path}:{node.lineno}: imports {module}")
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    """Not in a circle of any length, and not inside functions either."""
    modules = {
        ".".join(("stratakv", *path.with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sources()
        if path.parts[0] in PACKAGE_FOLDERS
    }
    assert len(modules) > 300
    left = {
        name: {module for module, _ in imports_of(path) if module in modules and module != name}
        for name, path in modules.items()
        if path.name != "__init__.py"  # a folder's doors name what lies in it
    }
    while ends := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in ends:
            del left[name]
    assert not left, f"import each other, or what does: {sorted(left)}"


def test_folders_call_each_other_relatively() -> None:
    """Inside the package, `from ..tiers` holds whatever name the package is installed under."""
    wrong = []
    for path in sources():
        if path.parts[0] not in PACKAGE_FOLDERS or "_pb2" in path.name:
            continue
        for module, node in imports_of(path):
            absolute = isinstance(node, ast.Import) or not node.level
            if absolute and _starts_with(module, "stratakv"):
                wrong.append(f"{path}:{node.lineno}: imports {module}")
    assert wrong == []


def test_gpu_packages_are_imported_inside_functions() -> None:
    wrong = []
    for path in sources():
        if path.parts[0] not in PACKAGE_FOLDERS:
            continue
        top = {id(node) for node in _tree(path).body}
        for module, node in imports_of(path):
            folders = LAZY.get(module.partition(".")[0])
            if folders is not None and id(node) in top and not any(_in(path, f) for f in folders):
                wrong.append(f"{path}:{node.lineno}: imports {module} at the top of the file")
    assert wrong == []


# What opens connections that a proxy of the environment may be put into, tokens and all -> where it
# stands, or what to write instead.
PROXIED = {
    "insecure_channel": "tiers/wire/rpc.py",
    "secure_channel": "tiers/wire/rpc.py",
    "urlopen": "an opener with ProxyHandler({})",
}


def test_no_connection_goes_through_a_proxy() -> None:
    wrong, made = [], set()
    for path in sources():
        for node in _nodes(_tree(path)):
            if isinstance(node, ast.Call):
                names = [_dotted(node.func).rpartition(".")[2]]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if PROXIED.get(name) == path.as_posix():
                    made.add(name)
                elif name in PROXIED and not (name == "urlopen" and path.parts[0] == "tests"):
                    wrong.append(f"{path}:{node.lineno}: {name}: use {PROXIED[name]}")
    assert wrong == []
    assert made == {"insecure_channel", "secure_channel"}


def _licensed_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".pyi", ".proto", ".sh", ".service"):
                yield path
    yield from (ROOT / name for name in ("__init__.py", "Makefile", "pyproject.toml", ".ci/run"))


def test_every_source_file_starts_with_its_licence() -> None:
    missing = []
    for path in _licensed_files():
        lines = path.read_text().splitlines()
        lines = lines[1:] if lines and lines[0].startswith("#!") else lines
        if not lines or SPDX not in lines[0]:
            missing.append(str(path.relative_to(ROOT)))
    assert missing == []


def test_every_module_opens_with_a_docstring() -> None:
    missing = [
        str(path)
        for path in sources()
        if "_pb2" not in path.name and not ast.get_docstring(_tree(path))
    ]
    assert missing == []
