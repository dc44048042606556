# SPDX-License-Identifier: Apache-2.0
"""Counts of properties that make the product hard to read, each with its findings.

`tests/house_limits.json` has the limit of each count. A limit may be lowered, never raised.

    glued constants       a constant or logger below the first definition of its module, which needs
                          nothing defined there: two files were joined
    floating comments     a block comment of a module's top level that is followed by an empty line
    clause openings       a docstring that opens with a clause or a pronoun in place of the noun
    short docstrings      a docstring of at most nine words, over a body of at most three lines
    people                words for persons, in place of the part that acts
    one-word methods      a method name without underscore in four unrelated classes or more
    repeated file names   a file name that occurs in two folders
    full folders          a folder with more than fifteen modules
    constructor parameters   of the connector, the hierarchy and the scheduler
    containers by request    attributes of connector and scheduler whose keys are request ids
    connector methods     public methods of KVConnectorScheduler
    product lines         of all modules; grows with every feature, and has no limit
    lines for 1,000 statements    lines of all modules for 1,000 Python statements
    function lines        median, 95th percentile and maximum, from `def` to the last line"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PRODUCT = ("connector", "engine", "kernels", "tiers")
# Folders with the decisions about blocks, whose constructors are checked, unlike those in APART.
FLOORS = ("connector/", "tiers/hierarchy/", "engine/scheduler/")
APART = tuple(f"connector/{name}/" for name in ("chunks", "device", "lmcache", "sglang", "vllm"))
CONTRACT = "KVConnectorScheduler"
PRODUCT_LINES = "product lines"
FULL_MODULES = 15
UNRELATED_CLASSES = 4
SHORT_WORDS, SHORT_LINES = 9, 3
OPENINGS = frozenset((
    "As", "Before", "Behind", "Beside", "By", "For", "From", "Has", "Have", "How", "In", "Nobody",
    "None", "Not", "Nothing", "Of", "Once", "One", "So", "That", "Those", "To", "Under", "What",
    "When", "Where", "Which", "Who", "Whoever", "With",
))  # fmt: skip
PEOPLE = re.compile(r"\b(?:anybody|everybody|nobody|somebody|whoever)\b", re.IGNORECASE)
KEYED = re.compile(r"self\.(\w+): (?:dict\[str|set\[str|Remembered)")
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+|log|logger")

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file of the product, parsed once."""

    path: str  # relative to the root
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]  # all nodes of `tree`

    @property
    def is_on_floors(self) -> bool:
        return self.path.startswith(FLOORS) and not self.path.startswith(APART)

    def of_kind(self, *kinds: type[Node]) -> Iterator[Node]:
        """Return all syntax nodes of the module, at any depth, of one of the types `kinds`."""
        return (node for node in self.nodes if isinstance(node, kinds))


def read_module(root: Path, path: str) -> Module:
    """Read and parse the file at `path` below `root`. Raises SyntaxError."""
    text = (root / path).read_text(encoding="utf-8")
    tree = ast.parse(text, path)
    return Module(path, text, tree, tuple(ast.walk(tree)))


def is_counted(path: str) -> bool:
    """Whether the file belongs to the product and is written by hand."""
    return path.split("/")[0] in PRODUCT and not path.endswith("_pb2.py")


def count(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Return the findings in `modules`, by the name of the count."""
    files = [module for module in modules if not module.path.endswith("__init__.py")]
    return {
        "glued constants": [each for module in modules for each in glued_constants(module)],
        "floating comments": [each for module in modules for each in floating_comments(module)],
        "clause openings": [each for module in modules for each in clause_openings(module)],
        "short docstrings": [each for module in modules for each in short_docstrings(module)],
        "people": [each for module in modules for each in people(module)],
        "one-word methods": one_word_methods(modules),
        "repeated file names": repeated_names(files),
        "full folders": full_folders(files),
        "constructor parameters": [each for module in modules for each in parameters(module)],
        "containers by request": [each for module in modules for each in keyed_by_request(module)],
        "connector methods": [each for module in modules for each in contract_methods(module)],
    }


def sizes(modules: Sequence[Module]) -> dict[str, int]:
    """Return the counts that are sizes: the product's lines, and the lines of its functions."""
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        for node in module.of_kind(ast.FunctionDef, ast.AsyncFunctionDef)
    )
    written = [module for module in modules if not module.path.endswith("__init__.py")]
    num_lines = sum(len(module.text.splitlines()) for module in written)
    num_statements = sum(1 for module in written for _ in module.of_kind(ast.stmt))
    return {
        PRODUCT_LINES: num_lines,
        "lines for 1,000 statements": round(1000 * num_lines / max(1, num_statements)),
        "median function lines": int(statistics.median(lengths)) if lengths else 0,
        "95th percentile of function lines": lengths[len(lengths) * 95 // 100] if lengths else 0,
        "most function lines": lengths[-1] if lengths else 0,
    }


def glued_constants(module: Module) -> Iterator[str]:
    """Yield module-level constants and loggers that follow a definition but use no definition."""
    defined = {node.name for node in module.tree.body if isinstance(node, Definition)}
    is_behind = False
    for node in module.tree.body:
        is_behind |= isinstance(node, Definition)
        if not is_behind or not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name) or not CONSTANT.fullmatch(target.id):
            continue
        used = {name.id for name in ast.walk(node.value or node) if isinstance(name, ast.Name)}
        if not used & defined:
            yield f"{module.path}:{node.lineno} {target.id}"


def floating_comments(module: Module) -> Iterator[str]:
    """Yield unindented comments, below the head of the file, that an empty line follows."""
    lines = module.text.splitlines()
    first = 0
    while first < len(lines):
        if not lines[first].startswith("# ") or "SPDX" in lines[first]:
            first += 1
            continue
        behind = next(
            (at for at in range(first, len(lines)) if not lines[at].startswith("#")), len(lines)
        )
        if first > 3 and behind < len(lines) and not lines[behind].strip():
            yield f"{module.path}:{first + 1} {lines[first]}"
        first = behind


def documented(module: Module) -> Iterator[tuple[Definition, str]]:
    """Yield functions and classes that have docstrings, each with its docstring."""
    for node in module.of_kind(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        if docstring := ast.get_docstring(node):
            yield node, docstring


def clause_openings(module: Module) -> Iterator[str]:
    """Yield functions and classes whose docstring begins with a word of OPENINGS."""
    for node, docstring in documented(module):
        word = re.match(r"[`\"']*([A-Za-z]+)", docstring.strip())
        if word and word[1] in OPENINGS:
            yield f"{module.path}:{node.lineno} {node.name}: {docstring.splitlines()[0]}"


def short_docstrings(module: Module) -> Iterator[str]:
    """Yield short functions with a short docstring, which a better function name would replace."""
    for node, docstring in documented(module):
        if isinstance(node, ast.ClassDef) or len(node.body) < 2:
            continue
        lines = (node.end_lineno or node.lineno) - node.body[1].lineno + 1
        if len(docstring.split()) <= SHORT_WORDS and lines <= SHORT_LINES:
            yield f"{module.path}:{node.lineno} {node.name}: {docstring.splitlines()[0]}"


def people(module: Module) -> Iterator[str]:
    """Yield each line with a word of PEOPLE, in code, strings or comments, once for each word."""
    for number, line in enumerate(module.text.splitlines(), 1):
        for _ in PEOPLE.finditer(line):
            yield f"{module.path}:{number} {line.strip()}"


def one_word_methods(modules: Sequence[Module]) -> list[str]:
    """Return the method names without an underscore that occur in classes of at least
    UNRELATED_CLASSES families. A family is a class of the product with all classes that inherit
    from the class by their first base."""
    bases: dict[str, str] = {}
    owners: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in module.of_kind(ast.ClassDef):
            if node.bases and isinstance(node.bases[0], ast.Name):
                bases[node.name] = node.bases[0].id
            elif node.bases and isinstance(node.bases[0], ast.Attribute):
                bases[node.name] = node.bases[0].attr
            for method in methods(node):
                if "_" not in method.strip("_") and not method.startswith("__"):
                    owners[method].add(node.name)
    known = set(bases).union(*owners.values()) if owners else set()
    found = {name: {family(each, bases, known) for each in has} for name, has in owners.items()}
    return [
        f"{name}: {', '.join(sorted(has))}"
        for name, has in sorted(found.items())
        if len(has) >= UNRELATED_CLASSES
    ]


def methods(node: ast.ClassDef) -> list[str]:
    """Return the names of the methods that a class defines and does not inherit."""
    return [each.name for each in node.body if isinstance(each, Function)]


def family(name: str, bases: dict[str, str], known: set[str]) -> str:
    """Return the oldest ancestor of the class `name` among the classes in `known`."""
    passed = set()
    while name in bases and name not in passed and bases[name] in known:
        passed.add(name)
        name = bases[name]
    return name


def repeated_names(files: Sequence[Module]) -> list[str]:
    """Return the file names that occur in two folders or more, with counts."""
    counted = Counter(Path(module.path).name for module in files)
    return [f"{name}: {times} times" for name, times in sorted(counted.items()) if times > 1]


def full_folders(files: Sequence[Module]) -> list[str]:
    """Return the folders that directly contain more than FULL_MODULES modules, with counts."""
    counted = Counter(Path(module.path).parent.as_posix() for module in files)
    return [f"{name}/: {size} modules" for name, size in counted.items() if size > FULL_MODULES]


def parameters(module: Module) -> Iterator[str]:
    """Yield the constructor parameters of the classes in a module below FLOORS."""
    if not module.is_on_floors:
        return
    for node in module.of_kind(ast.ClassDef):
        for method in node.body:
            if isinstance(method, Function) and method.name == "__init__":
                taken = [*method.args.args[1:], *method.args.kwonlyargs]
                yield from (f"{module.path}:{node.name} {each.arg}" for each in taken)


def keyed_by_request(module: Module) -> Iterator[str]:
    """Yield the attributes of the connector and the scheduler whose keys are request ids."""
    if module.is_on_floors and not module.path.startswith("tiers/"):
        yield from (f"{module.path} {found[1]}" for found in KEYED.finditer(module.text))


def contract_methods(module: Module) -> Iterator[str]:
    """Yield the public methods of the class CONTRACT."""
    for node in module.of_kind(ast.ClassDef):
        if node.name == CONTRACT:
            yield from (
                f"{module.path} {name}" for name in methods(node) if not name.startswith("_")
            )
