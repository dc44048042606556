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
    "collector": "",
    "json_schemas": "",
    "logs": "",
    "models": "",
    "request": "json_schemas models",
    "pictures": "models request",
    "batch": "request",
    "config": "logs models request",
    "observer": "request",
    "cache": "models observer request",
    "sampling": "batch request",
    "trace": "config observer request",
    "plan": "cache config models",
    "scheduler": "cache config observer request",
    "structured": "json_schemas models request sampling",
    "worker": "batch cache config models plan request sampling scheduler",
    "core": (
        "cache collector config logs models observer plan request sampling scheduler structured "
        "trace worker"
    ),
    "client": "config core request",
    "text": "client models request",
    "api": "client config json_schemas models pictures request text",
    "offline": "api client config models pictures request text",
    "router": "api logs",
    "llm": "api client config core logs models offline request sampling text",
    "cli": (
        "api cache client config core llm logs models plan request router sampling text trace "
        "worker"
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
        ("engine/config/engine_config.py", "from ..core import offload"),
        ("engine/unknown/example.py", "from ..request import Request"),
    ],
)
def test_the_rule_of_engine_imports_sees_each_form(
    path: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_static_rules, "_tree", lambda path: ast.parse(code))
    assert list(_unlisted_in_engine(Path(path)))
