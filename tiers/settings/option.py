# SPDX-License-Identifier: Apache-2.0
"""Options of the system: name, reader, checks and help of each, declared as dataclass fields.

    class SsdSettings:
        capacity_bytes: int = setting(20 * GIB, readers.size, "size of the ssd tier", "SIZE")

`options_of` turns the fields of such a class into a table. The flags, environment variables, file
keys, help and defaults of all serving commands and of the adapters are made from this table. So a
new option takes one field and the code that uses it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from . import readers
from .readers import Reader
from .sizes import exact_size
from .values import ConfigError, size_within, within

Kind = TypeVar("Kind")

# The text shown in place of a secret, which hides the secret's length too.
MASK = "***"


@dataclass(frozen=True, slots=True)
class Option:
    """An option: the field that it sets, its reader, its bounds and its help."""

    section: str  # the object with the field, within all settings: "cache"
    field: str
    read: Reader
    help: str
    metavar: str = ""  # empty: a switch, with a --no- form
    unset: str = "none"  # the default in words, if its value has no text form
    is_secret: bool = False
    least_bytes: int | None = None  # the lower bound of a size
    bounds: tuple[int, int] | None = None  # of a whole number, both included
    default: Any = None

    @property
    def path(self) -> str:
        """The dotted path of the field, from the object of all settings."""
        return f"{self.section}.{self.field}" if self.section else self.field

    def check_value(self, called: str, value: Any) -> None:
        """Raise ConfigError for an invalid value, made by a reader or by Python code."""
        if value is None or value == self.default:
            return
        read = self.read(called, value)
        if isinstance(read, str) and isinstance(value, str) and read != value:
            raise ConfigError(f"{called} takes {read!r} here, not {value!r}, which means the same")
        if self.bounds is not None:
            within(called, value, *self.bounds)
        if self.least_bytes is not None:
            size_within(called, value, self.least_bytes)

    def file_value(self, value: Any) -> Any:
        """Return the value as in a file, None for an empty value, `MASK` for a secret."""
        if self.read is readers.tiers:
            return ",".join(value) or "none"
        if value is None or value in ("", b"", {}, ()):
            return None
        if self.is_secret:
            return MASK
        if self.read is readers.tier_options:
            return ",".join(f"{t}.{o}={v}" for t, of in value.items() for o, v in of.items())
        if self.read is readers.size:
            return exact_size(value) or str(value)
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value) if isinstance(value, Path) else value

    @property
    def default_text(self) -> str:
        """Return the default as shown in help and docs: in words, or like a flag's value."""
        value = self.file_value(self.default)
        if value is None:
            return self.unset
        if isinstance(value, bool):
            return "on" if value else "off"
        is_time = isinstance(value, float) and self.metavar != "SHARE"
        return f"{value:g}" if is_time else str(value)


def setting(
    default: Any,
    read: Reader,
    help: str,
    metavar: str = "",
    unset: str = "none",
    *,
    name: str = "",
    **more: Any,
) -> Any:
    """Declare a field of a frozen dataclass as an option. `name` is the option's name if it differs
    from the field's. `default` may be a function that makes the default; `MISSING` means no
    default. `more` are further fields of the Option. The dataclass's repr omits secrets."""
    option = Option("", name, read, help, metavar, unset, **more)
    made = {"default_factory": default} if callable(default) else {"default": default}
    return dataclasses.field(metadata={Option: option}, repr=not option.is_secret, **made)


def options_of(kind: type, section: str, prefix: str = "") -> dict[str, Option]:
    """Return the options among the fields of a class, by name, in the order of declaration. A field
    that a subclass declares again is ordered with the fields of the subclass. In a help text,
    `{them}` is replaced by the class's `THEM`, for fields that several classes share."""
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
                default=_default_of(field),
            )
    return table


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def build_settings(
    kind: type[Kind], values: Mapping[str, Mapping[str, Any]], section: str = "", **given: Any
) -> Kind:
    """Build an object of the settings class `kind` from values by section and field. The section
    "offload.ssd" has the fields of the object `ssd` in the object `offload`. `given` are further
    fields. Raises ConfigError for values that contradict each other."""
    made = {**values.get(section, {}), **given}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        part: Any = field.default_factory
        if isinstance(part, type) and dataclasses.is_dataclass(part) and field.name not in made:
            made[field.name] = build_settings(part, values, f"{section}.{field.name}".lstrip("."))
    return kind(**made)


def read_fields(table: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values `given` by field; ignore other names. Raises ConfigError with the flag."""
    return {
        option.field: option.read(flag_of(name), given[name])
        for name, option in table.items()
        if name in given
    }


def check_options(table: Mapping[str, Option], settings: object) -> None:
    """Check the options of `table` in `settings`. Raises ConfigError with the flag."""
    for name, option in table.items():
        option.check_value(flag_of(name), attrgetter(option.path)(settings))


def flag_of(name: str) -> str:
    """`block_size` → `--block-size`."""
    return "--" + name.replace("_", "-")
