# SPDX-License-Identifier: Apache-2.0
"""One option: how it is called, read, checked and explained; and fields of value objects that are.

    class SsdSettings:
        capacity_bytes: int = setting(20 * GIB, readers.size, "size of the ssd tier", "SIZE")

`options_of` turns the fields of such a class into a table. Flags, environment variables, files,
help and the default come from that table, so a new option is one field and the code that uses it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from .readers import Reader
from .values import size_within

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: where it goes and how its value is read."""

    section: str  # the value object that has the field, below the one with all settings: "cache"
    field: str
    read: Reader
    help: str
    metavar: str = ""  # empty: a switch with --no-
    unset: str = "none"  # the default in words, where the value object's says nothing
    is_secret: bool = False
    least_bytes: int | None = None  # of a size

    @property
    def path(self) -> str:
        """The field below the object with all settings."""
        return f"{self.section}.{self.field}" if self.section else self.field

    def check(self, called: str, value: Any) -> None:
        """Raises ConfigError for a value that was read, or given in Python, and cannot be."""
        if value is None or value == "":
            return
        self.read(called, value)
        if self.least_bytes is not None:
            size_within(called, value, self.least_bytes)


def setting(
    default: Any,
    read: Reader,
    help: str,
    metavar: str = "",
    unset: str = "none",
    *,
    name: str = "",
    least_bytes: int | None = None,
) -> Any:
    """A field of a frozen dataclass that is an option. `name` is that of the option where the
    field's differs. A default that can be called makes the default."""
    option = Option("", name, read, help, metavar, unset, least_bytes=least_bytes)
    made = {"default_factory": default} if callable(default) else {"default": default}
    return dataclasses.field(metadata={Option: option}, **made)


def options_of(kind: type, section: str, prefix: str = "") -> dict[str, Option]:
    """The options among the fields of a class, by name, in the order of their declarations; a field
    that a subclass declares anew stands there. `{them}` in a help is the `THEM` of the class, where
    it shares fields with another."""
    table, them = {}, getattr(kind, "THEM", "")
    declared: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        for name in inspect.get_annotations(base):
            declared.pop(name, None)
            declared[name] = None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for field in (fields[name] for name in declared if name in fields):
        option = field.metadata.get(Option)
        if option is not None:
            table[prefix + (option.field or field.name)] = dataclasses.replace(
                option,
                section=section,
                field=field.name,
                help=option.help.replace("{them}", them),
            )
    return table


def build_settings(
    kind: type[Kind], values: Mapping[str, Mapping[str, Any]], section: str = "", **given: Any
) -> Kind:
    """The value object of a class from the values of its fields by section: "offload.ssd" has those
    of the field `ssd` of the field `offload`. `given` are fields beside them. Raises ConfigError
    for values that cannot work together."""
    made = {**values.get(section, {}), **given}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        part: Any = field.default_factory
        if isinstance(part, type) and dataclasses.is_dataclass(part) and field.name not in made:
            made[field.name] = build_settings(part, values, f"{section}.{field.name}".lstrip("."))
    return kind(**made)


def check_options(table: Mapping[str, Option], settings: object) -> None:
    """Check the values of these options in the object that their paths begin at. Raises
    ConfigError, which names the flag."""
    for name, option in table.items():
        option.check(flag_of(name), attrgetter(option.path)(settings))


def flag_of(name: str) -> str:
    """`block_size` → `--block-size`."""
    return "--" + name.replace("_", "-")
