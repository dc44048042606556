# SPDX-License-Identifier: Apache-2.0
"""Which room of engine/ may import which: the table, and that the code follows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import test_static_rules
from .test_static_rules import imports_of, sources

# The rooms of engine/ from the bottom up: its folders and the modules beside them, each with the
# rooms it imports. A room lists only rooms above it in this table, so no arrow runs up.
ENGINE_ROOMS: dict[str, str] = {
    "extras": "",
    "logprobs": "",
    "logs": "",
    "models": "",
    "not_built": "",
    "offload_config": "",
    "config": "offload_config",
    "probes": "models",
    "reasoning": "",
    "json_schemas": "",
    "structured_params": "json_schemas",
    "sampling_params": "logprobs reasoning structured_params",
    "embeds": "",
    "handover": "logprobs sampling_params",
    "options": "config models not_built offload_config",
    "request": "logprobs sampling_params",
    "observer": "request",
    "wire": "handover logprobs sampling_params",
    "pooling": "models sampling_params wire",
    "batch": "request sampling_params",
    "cache": "models observer request",
    "plan": "cache config models",
    "settings": "config logprobs logs not_built offload_config options",
    "sampling": "batch logprobs reasoning request sampling_params",
    "structured": "json_schemas models reasoning request sampling structured_params wire",
    "scheduler": "cache config embeds logprobs observer request sampling_params wire",
    "worker": (
        "batch cache config embeds logprobs models plan request sampling sampling_params scheduler"
    ),
    "trace": "config observer request",
    "core": (
        "cache config embeds extras handover logprobs logs models observer offload_config plan "
        "request sampling sampling_params scheduler structured trace wire worker"
    ),
    "client": "config core wire",
    "text": "client handover logprobs models reasoning request sampling_params wire",
    "api": (
        "client embeds handover json_schemas logprobs pooling request sampling_params settings "
        "structured_params text wire"
    ),
    "router": "api logs",
    "offline": "api client logprobs pooling request sampling_params text wire",
    "llm": (
        "api client core embeds logs models offline options pooling request sampling "
        "sampling_params text wire"
    ),
    "cli": (
        "api cache client config core extras llm logs models not_built offload_config options plan "
        "probes router sampling sampling_params settings text trace wire worker"
    ),
}


def _engine_room(path: Path) -> str:
    return path.parts[1] if len(path.parts) > 2 else path.stem


def _engine_arrows(path: Path) -> Iterator[tuple[str, int]]:
    """The other rooms of engine/ that this file imports, each with its line."""
    for module, node in imports_of(path):
        parts = module.split(".")
        if parts[:2] == ["stratakv", "engine"] and len(parts) > 2:
            if parts[2] != _engine_room(path):
                yield parts[2], node.lineno


def _unlisted_in_engine(path: Path) -> Iterator[str]:
    """Imports of rooms that are not in the row of this file's room, one sentence each."""
    room = _engine_room(path)
    for other, line in sorted(set(_engine_arrows(path))):
        if other not in ENGINE_ROOMS.get(room, "").split():
            yield f"{path}:{line}: {room} imports {other}"


def _engine_files() -> list[Path]:
    # The doors of the package only name what lies inside.
    return [
        path for path in sources() if path.parts[0] == "engine" and path.parts[1] != "__init__.py"
    ]


def test_engine_rooms_import_only_rooms_below_them() -> None:
    paths = _engine_files()
    assert {_engine_room(path) for path in paths} == set(ENGINE_ROOMS), (
        "a room of engine/ is new or gone: add or delete its row in ENGINE_ROOMS"
    )
    assert [finding for path in paths for finding in _unlisted_in_engine(path)] == [], (
        "a new arrow between rooms of engine/: if the room it points to stands lower in "
        "ENGINE_ROOMS, add it to the row; if it stands higher, move what both need into a lower "
        "room (as engine/batch does for worker and sampling), or hand it over as an argument"
    )


def test_the_table_of_engine_rooms_has_no_arrow_up_and_none_too_many() -> None:
    used: dict[str, set[str]] = {room: set() for room in ENGINE_ROOMS}
    for path in _engine_files():
        used[_engine_room(path)].update(room for room, _ in _engine_arrows(path))
    below: set[str] = set()
    for room, listed in ENGINE_ROOMS.items():
        assert set(listed.split()) <= below, (
            f"{room} lists a room that stands beside it or higher; move what both need down"
        )
        assert set(listed.split()) == used[room], (
            f"the row of {room} in ENGINE_ROOMS lists a room that it no longer imports: delete it"
        )
        below.add(room)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("engine/scheduler/example.py", "from ..worker.model_runner import ModelRunner"),
        ("engine/scheduler/example.py", "from .. import llm"),
        ("engine/models/example.py", "def f():\n    from ..config import EngineConfig"),
        ("engine/models/checkpoint/example.py", "from ...core import engine_core"),
        ("engine/config/engine_config.py", "from .options import engine_config"),
        ("engine/unknown/example.py", "from ..request import Request"),
    ],
)
def test_the_rule_of_engine_imports_sees_each_form(
    path: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_static_rules, "_tree", lambda path: ast.parse(code))
    assert list(_unlisted_in_engine(Path(path)))
