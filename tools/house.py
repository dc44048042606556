# SPDX-License-Identifier: Apache-2.0
"""Counts what makes the code hard to read: the counts of `house_counts.py`, and forbidden words.

    python tools/house.py           one line for each count
    python tools/house.py --list    the findings of each count
    python tools/house.py --lower   write what has fallen into tests/house_limits.json

`house_words.py` lists the forbidden words, which are searched in identifiers, not in strings or
comments. "Stamps" are texts, anywhere in a file, that match the pattern STAMP. tests/test_house.py
fails if a count exceeds its limit; `tools/follow_block.py` counts doors."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import house_counts
from house_counts import Module
from house_words import NOW, Identifier, Kind, Rules

FOLDERS = ("benchmarks", *house_counts.PRODUCT, "proto", "tools", "deploy", "tests")
LIMITS = "tests/house_limits.json"
STAMP = re.compile(r"knows[\s#]+nothing[\s#]+of", re.IGNORECASE)

# The attribute of each syntax node that contains a name, and the name's kind. The `b` of `import a
# as b` is not listed, because it is found where it is used.
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
    """The identifiers of one file, and the lines of its stamps."""

    path: Path  # below the root
    names: dict[Identifier, int]  # identifier → the first line that contains it
    stamps: list[int]  # lines with a stamp


@dataclass(slots=True)
class House:
    """All counts. A finding is one line of text."""

    findings: dict[str, list[str]]  # name of a count in `house_counts.py` → findings
    sizes: dict[str, int]
    words: list[str] = field(default_factory=list)  # one for each forbidden identifier
    stamps: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, int]:
        """Return every count that has a limit, by the name of the limit."""
        found = {name: len(each) for name, each in self.findings.items()}
        return found | {"stamps": len(self.stamps), "words": len(self.words)} | self.sizes


def count(root: Path) -> House:
    """Count everything below `root`. Raises SyntaxError for a file that cannot be parsed."""
    product, words, stamps = [], [], []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            module = house_counts.read_module(root, path.relative_to(root).as_posix())
            source = read_source(module)
            words += forbidden_names(source, NOW)
            stamps += [f"{source.path}:{line}" for line in source.stamps]
            if house_counts.is_counted(module.path):
                product.append(module)
    return House(house_counts.count(product), house_counts.sizes(product), words, stamps)


def read_source(module: Module) -> Source:
    """Return the identifiers of a file, and the lines of its stamps."""
    path, text = Path(module.path), module.text
    stamps = [text.count("\n", 0, found.start()) + 1 for found in STAMP.finditer(text)]
    source = Source(path, {}, stamps)
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    source.names[Identifier(stem.removeprefix("test_"), Kind.MODULE)] = 1
    node: Any  # the node's type decides which attributes it has
    for node in module.nodes:
        if (named := _NAMED_BY.get(type(node))) is not None:
            attribute, kind = named
            name: str | None = getattr(node, attribute)
            # Names of test functions are sentences, whose words are not checked.
            if name is not None and not (kind is Kind.FUNCTION and name.startswith("test_")):
                last = name.rpartition(".")[2]  # `b` for `import a.b`
                source.names.setdefault(Identifier(last, kind), node.lineno)
    return source


def forbidden_names(source: Source, rules: Rules) -> list[str]:
    """Return a line of text for each forbidden identifier of a file, with its first line number."""
    hits: dict[str, str] = {}
    for identifier, line in source.names.items():
        if (rule := rules.against(identifier, source.path.parent)) is not None:
            name = identifier.name
            hits.setdefault(name, f"{source.path}:{line} {name}: say {rule.better}")
    return list(hits.values())


def lower(limits: dict[str, int], numbers: dict[str, int]) -> dict[str, int]:
    """Return the limits, each lowered to its count if the count is lower. Raises ValueError for a
    count that exceeds its limit."""
    risen = [name for name, most in limits.items() if numbers.get(name, most) > most]
    if risen:
        raise ValueError(f"above their limits: {', '.join(risen)}; a limit never goes up")
    return {name: min(most, numbers.get(name, most)) for name, most in limits.items()}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name each finding")
    parser.add_argument("--lower", action="store_true", help="lower the limits to the counts")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    given = parser.parse_args(words)
    house = count(given.root)
    findings = house.findings | {"words": house.words, "stamps": house.stamps}
    for name, number in house.numbers().items():
        print(f"{number:7,}  {name}")
        if given.list and name in findings:
            print(*(f"           {finding}" for finding in findings[name]), sep="\n")
    if given.lower:
        path = given.root / LIMITS
        lowered = lower(json.loads(path.read_text()), house.numbers())
        path.write_text(json.dumps(lowered, indent=1) + "\n")


if __name__ == "__main__":
    main()
