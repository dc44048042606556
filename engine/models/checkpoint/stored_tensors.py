# SPDX-License-Identifier: Apache-2.0
"""StoredTensors: the tensors in the files of a safetensors model, checked by name, shape and type.

This module reads only the files' headers and needs no torch; `checkpoint.py` reads the numbers. The
caller passes the expected names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from ....tiers.settings.format import format_name
from ....tiers.settings.values import ConfigError
from .shards import DERIVED, INDEX_FILE, find_shards

FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
# The value head of reward training, which some checkpoints have; text generation does not use it.
_VALUE_HEAD = "v_head."
_QUANTISED = (".qweight", ".qzeros")


class StoredTensors:
    """The open shards of a model, as a context manager."""

    def __init__(
        self,
        path: Path,
        name_of: Callable[[str], str | None] | None = None,
        *,
        framework: str = "numpy",
        device: str = "cpu",
    ) -> None:
        """Open every shard under `path`. `name_of` maps the stored name of a tensor to its name in
        this project, or to None if the tensor is to be ignored. Raises ConfigError with the file's
        name if a file is missing or damaged, or lacks a tensor that the index file lists."""
        self.path = path
        self._opened_as = {"framework": framework, "device": device}
        self._where: dict[str, Any] = {}  # this project's name → open file
        self._stored: dict[str, str] = {}  # this project's name → stored name
        self._file_of: dict[str, Path] = {}  # this project's name → file path
        self._name_of = name_of
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._open_shards(stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def tensor_names(self) -> list[str]:
        """The tensors by the names of this project, without ignored tensors."""
        return [
            name
            for name in self._where
            if not DERIVED.search(name) and not name.startswith(_VALUE_HEAD)
        ]

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if it does not exist."""
        if name not in self._where:
            return None
        return tuple(self._where[name].get_slice(self._stored[name]).get_shape())

    def check_expected(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless exactly the expected tensors exist, in their shapes."""
        missing = [name for name in expected if name not in self._where]
        if missing and any(name.endswith(_QUANTISED) for name in self._where):
            raise ConfigError(
                f"{self.path} holds quantised weights (GPTQ or AWQ), which are not supported; take "
                "the model that they were made of"
            )
        if missing:
            raise ConfigError(f"{self.path} lacks {_count(missing)}; download the model again")
        unknown = [name for name in self.tensor_names if name not in expected]
        if unknown:
            raise ConfigError(
                f"{self.path} holds {_count(unknown)} that config.json does not describe; correct "
                "config.json or download the model again"
            )
        for name, shape in expected.items():
            found = self._where[name].get_slice(self._stored[name])
            if tuple(found.get_shape()) != shape:
                raise ConfigError(
                    f"{self.path}: {name} must have shape {list(shape)} by config.json, "
                    f"not {found.get_shape()}; correct config.json or download the model again"
                )
            if found.get_dtype() not in FLOAT_TYPES:
                raise ConfigError(
                    f"{self.path}: {name} must be one of {', '.join(FLOAT_TYPES)}, "
                    f"not {found.get_dtype()}; quantised weights are not supported"
                )

    def _open_shards(self, stack: ExitStack) -> None:
        shards = find_shards(self.path)
        files = {}
        for file in shards.files:
            try:
                files[file] = stack.enter_context(safe_open(file, **self._opened_as))
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{file} is not a whole safetensors file ({error}); download the model again"
                ) from error
        held = {file: set(opened.keys()) for file, opened in files.items()}
        for name, file in (shards.weight_map or {}).items():
            if name not in held[file]:
                raise ConfigError(
                    f"{file} lacks {format_name(name)}, which {INDEX_FILE} says it holds"
                )
        for file, opened in files.items():
            for stored in held[file]:
                ours = stored if self._name_of is None else self._name_of(stored)
                if ours is not None:
                    self._add_tensor(ours, stored, opened, file)

    def _add_tensor(self, name: str, stored: str, opened: Any, file: Path) -> None:
        before = self._file_of.get(name)
        if before is not None and not DERIVED.search(name):
            other = format_name(self._stored[name])
            raise ConfigError(
                f"{self.path} holds {format_name(name)} twice, as {other} in "
                f"{format_name(before.name)} and as {format_name(stored)} in "
                f"{format_name(file.name)}; download the model again"
            )
        self._where[name], self._stored[name], self._file_of[name] = opened, stored, file


def _count(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the tensor {format_name(names[0])}{more}"
