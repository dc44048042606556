# SPDX-License-Identifier: Apache-2.0
"""Counts how well the repository can be read: small modules, full folders, private words, lines.

    python tools/house.py           one line for each count
    python tools/house.py --list    every finding behind it

Everything comes from the syntax trees of the files, so words in strings and comments count nowhere,
except for the stamp sentence, which is looked for in the text. `house_words.py` holds the words.
tests/test_house.py holds the limits.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from house_words import NOW, Identifier, Kind, Rules

PRODUCT = ("connector", "engine", "kernels", "proto", "tiers")
FOLDERS = ("benchmarks", *PRODUCT, "tools", "deploy")  # whose modules are counted
PACKAGE = "stratakv"  # the name under which the repository root is imported
SMALL_LINES = 100
FULL_MODULES = 20
STAMP = re.compile(r"knows[\s#]+nothing[\s#]+of", re.IGNORECASE)

# Which attribute of a node is a name, and what carries it. The `b` of `import a as b` is found
# where it is used.
_NAMED_BY: dict[type[ast.AST], tuple[str, Kind]] = {
    ast.Name: ("id", Kind.VARIABLE),
    ast.arg: ("arg", Kind.VARIABLE),
    ast.keyword: ("arg", Kind.VARIABLE),
    ast.ExceptHandler: ("name", Kind.VARIABLE),
    ast.MatchAs: ("name", Kind.VARIABLE),
    ast.Attribute: ("attr", Kind.ATTRIBUTE),
    ast.ClassDef: ("name", Kind.CLASS),
    ast.FunctionDef: ("name", Kind.FUNCTION),
    ast.AsyncFunctionDef: ("name", Kind.FUNCTION),
    ast.alias: ("name", Kind.IMPORT),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What one file says, parsed once."""

    path: Path  # below the root
    num_lines: int
    names: dict[Identifier, int]  # the line of the first of each
    imports: list[ast.Import | ast.ImportFrom]
    stamps: list[int]  # lines

    @property
    def is_module(self) -> bool:
        return self.path.name != "__init__.py"

    @property
    def module(self) -> str:
        """Its dotted name below the root; a package's for its `__init__.py`."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts if self.is_module else parts[:-1])


@dataclass(slots=True)
class House:
    """What was counted; each finding is one line of text."""

    small: list[str] = field(default_factory=list)  # modules with exactly one importer
    full: list[str] = field(default_factory=list)  # folders
    full_tests: list[str] = field(default_factory=list)  # the same below tests/
    words: list[str] = field(default_factory=list)  # identifiers that the table replaces
    stamps: list[str] = field(default_factory=list)
    product_lines: int = 0
    benchmark_lines: int = 0


def count(root: Path) -> House:
    """Count everything below `root`. Raises SyntaxError for a file that does not parse."""
    sources = [read_source(root, path) for path in _files(root, FOLDERS)]
    tests = [read_source(root, path) for path in _files(root, ("tests",))]
    house = House(small_modules(sources), full_folders(sources), full_folders(tests))
    for source in [*sources, *tests]:
        house.words += forbidden_names(source, NOW)
        house.stamps += [f"{source.path}:{line}" for line in source.stamps]
    for source in sources:
        house.product_lines += source.num_lines * (source.path.parts[0] in PRODUCT)
        house.benchmark_lines += source.num_lines * (source.path.parts[0] == "benchmarks")
    return house


def _files(root: Path, folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path.relative_to(root) for path in (root / folder).rglob("*.py"))


def read_source(root: Path, path: Path) -> Source:
    """Parse a file and keep its names and imports."""
    text = (root / path).read_text(encoding="utf-8")
    stamps = [text.count("\n", 0, found.start()) + 1 for found in STAMP.finditer(text)]
    source = Source(path, len(text.splitlines()), {}, [], stamps)
    stem = path.stem if source.is_module else path.parent.name
    source.names[Identifier(stem.removeprefix("test_"), Kind.MODULE)] = 1
    node: Any  # which of its attributes there are depends on its type
    for node in ast.walk(ast.parse(text, str(path))):
        if (named := _NAMED_BY.get(type(node))) is not None:
            attribute, kind = named
            name: str | None = getattr(node, attribute)
            # A test function's name is a sentence.
            if name is not None and not (kind is Kind.FUNCTION and name.startswith("test_")):
                last = name.rpartition(".")[2]  # of `import a.b`
                source.names.setdefault(Identifier(last, kind), node.lineno)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source.imports.append(node)
    return source


def small_modules(sources: Sequence[Source]) -> list[str]:
    """Modules under SMALL_LINES lines that exactly one other file imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    known = {source.module for source in sources}
    for source in sources:
        for name in imported(source, known):
            importers[name].add(source.module)
    return [
        f"{source.path} ({source.num_lines} lines) is imported by {by} alone"
        for source in sources
        if source.is_module and source.num_lines < SMALL_LINES
        for by in importers[source.module]
        if len(importers[source.module]) == 1
    ]


def imported(source: Source, known: set[str]) -> Iterator[str]:
    """The modules and packages among `known` that a file imports, wherever the import stands."""
    package = source.module.split(".")[: -1 if source.is_module else None]
    for node in source.imports:
        if isinstance(node, ast.Import):
            names = [alias.name.removeprefix(f"{PACKAGE}.") for alias in node.names]
            yield from (name for name in names if name in known)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, node.module] if node.module else base)
            if not node.level:
                start = "" if start == PACKAGE else start.removeprefix(f"{PACKAGE}.")
            for alias in node.names:
                name = f"{start}.{alias.name}".removeprefix(".")
                if name in known or start in known:
                    yield name if name in known else start


def full_folders(sources: Sequence[Source]) -> list[str]:
    """Folders that hold more than FULL_MODULES modules themselves."""
    sizes = Counter(source.path.parent for source in sources if source.is_module)
    return [f"{folder}/: {size} modules" for folder, size in sizes.items() if size > FULL_MODULES]


def forbidden_names(source: Source, rules: Rules) -> list[str]:
    """Each forbidden name of a file once, where it stands first."""
    hits: dict[str, str] = {}
    for identifier, line in source.names.items():
        if (rule := rules.against(identifier, source.path.parent)) is not None:
            name = identifier.name
            hits.setdefault(name, f"{source.path}:{line} {name}: say {rule.better}")
    return list(hits.values())


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name each finding")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    given = parser.parse_args(words)
    house = count(given.root)
    for what, found in (
        (f"modules under {SMALL_LINES} lines with exactly one importer", house.small),
        (f"folders with more than {FULL_MODULES} modules", house.full),
        ("the same below tests/ (no limit)", house.full_tests),
        ("identifiers that the table of words replaces", house.words),
        ("the stamp sentence", house.stamps),
    ):
        print(f"{len(found):7,}  {what}")
        if given.list:
            print(*(f"           {finding}" for finding in found), sep="\n")
    print(f"{house.product_lines:7,}  lines of {', '.join(PRODUCT)}")
    print(f"{house.benchmark_lines:7,}  lines of benchmarks")


if __name__ == "__main__":
    main()
