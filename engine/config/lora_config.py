# SPDX-License-Identifier: Apache-2.0
"""`LoraConfig`: the LoRA adapters of an engine, and the limit of adapters in one step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import check_options, options_of, setting
from ...tiers.settings.values import ConfigError

MAX_SLOTS = 256
MAX_RANK = 1024
MAX_LOADED = 4096
MAX_NAME_CHARACTERS = 256


class LoraModule(NamedTuple):
    """A LoRA adapter that the engine loads at its start."""

    name: str
    path: Path  # the adapter's folder, as PEFT saves it

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def lora_modules(called: str, value: Any) -> tuple[LoraModule, ...]:
    """Read LoRA adapters from texts `name=path` with commas between, from vLLM's JSON objects with
    `name` and `path`, from a list of such texts or objects, or from a mapping of names to paths."""
    modules = tuple(_modules_in(called, value))
    names = [each.name for each in modules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{called} names {format_value(twice)} twice; give each its own name")
    return modules


def _modules_in(called: str, value: Any) -> list[LoraModule]:
    if isinstance(value, LoraModule):
        return [value]
    if isinstance(value, Mapping):
        if set(value) >= {"name", "path"}:
            return [_module(called, value["name"], value["path"])]
        if "name" in value:
            raise ConfigError(
                f"{called} takes objects with a name and a path, and one has {', '.join(value)}; "
                "add the path"
            )
        return [_module(called, name, path) for name, path in value.items()]
    if isinstance(value, list | tuple):
        return [module for each in value for module in _modules_in(called, each)]
    text = str(value).strip()
    if text.startswith(("{", "[")):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{called} takes name=path or JSON, and {format_value(text)} is no JSON ({error})"
            ) from None
        return _modules_in(called, values)
    found = []
    for part in text.split(","):
        name, equals, path = part.strip().partition("=")
        if not equals:
            raise ConfigError(
                f"{called} takes name=path, with commas between several, not {format_value(part)}"
            )
        found.append(_module(called, name, path))
    return found


def _module(called: str, name: Any, path: Any) -> LoraModule:
    folder = readers.path(f"the path in {called}", path)
    if "," in str(folder):
        raise ConfigError(
            f"{called} takes paths without commas, which separate adapters, not "
            f"{format_value(str(folder))}"
        )
    return LoraModule(adapter_name(f"the name in {called}", name), folder)


def adapter_name(called: str, value: Any) -> str:
    """Read the name of an adapter: printable text without `=`, `,` and spaces around it."""
    name = readers.text(called, value)
    if not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{called} takes printable characters without spaces around them, not {name!a}; "
            "leave the others out"
        )
    if len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"{called} takes up to {MAX_NAME_CHARACTERS} characters, not {len(name)}")
    if "," in name or "=" in name:
        raise ConfigError(f"{called} takes a text without `,` and `=`, not {format_value(name)}")
    return name


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of LoRA. Without `modules`, `folder` and `enabled`, the engine has no LoRA."""

    enabled: bool = setting(
        False, readers.switch, "take adapters also if none is named at the start",
        name="enable_lora",
    )  # fmt: skip
    modules: tuple[LoraModule, ...] = setting(
        (), lora_modules,
        "adapters to load at the start, as PEFT saves them: name=path, with commas between; "
        "requests name one as their model", "NAME=PATH,…", name="lora_modules",
    )  # fmt: skip
    folder: Path | None = setting(
        None, readers.path,
        "let clients load adapters out of this folder and unload them, at "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter", "PATH", name="lora_dir",
    )  # fmt: skip
    max_slots: int = setting(
        4, readers.integer, "different adapters in one step", "N", name="max_loras",
        bounds=(1, MAX_SLOTS),
    )  # fmt: skip
    max_rank: int = setting(
        16, readers.integer, "largest rank of an adapter", "N", name="max_lora_rank",
        bounds=(1, MAX_RANK),
    )  # fmt: skip
    max_loaded: int = setting(
        64, readers.integer, "adapters in host memory", "N", name="max_cpu_loras",
        bounds=(1, MAX_LOADED),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(options_of(LoraConfig, ""), self)
        if self.max_loaded < self.max_slots:
            raise ConfigError(
                f"--max-cpu-loras {self.max_loaded} cannot hold the adapters of one step "
                f"(--max-loras {self.max_slots}); raise the first or lower the second"
            )
        if len(self.modules) > self.max_loaded:
            raise ConfigError(
                f"--lora-modules names {len(self.modules)} adapters and --max-cpu-loras is "
                f"{self.max_loaded}; raise that"
            )

    @property
    def num_slots(self) -> int:
        """The number of adapters that the model can hold at once; 0 if LoRA is off."""
        takes = self.enabled or bool(self.modules) or self.folder is not None
        return self.max_slots if takes else 0
