# SPDX-License-Identifier: Apache-2.0
"""The rooms of tiers/ stand on one another: no room imports one that needs it."""

from __future__ import annotations

from pathlib import Path

from .test_static_rules import imports_of, sources


def _room(parts: tuple[str, ...]) -> str:
    return parts[1].removesuffix(".py")


def _rooms() -> dict[str, set[str]]:
    """The folders of tiers/ and the modules beside them, each with the rooms it imports."""
    rooms: dict[str, set[str]] = {}
    for path in sources():
        if path.parts[0] != "tiers" or path == Path("tiers/__init__.py"):
            continue
        named = (module.split(".")[1:] for module, _ in imports_of(path))
        others = {_room(tuple(parts)) for parts in named if parts[:1] == ["tiers"] and parts[1:]}
        rooms.setdefault(_room(path.parts), set()).update(others - {_room(path.parts)})
    return rooms


def _in_circles(rooms: dict[str, set[str]]) -> list[str]:
    """The rooms that import themselves, over others."""
    left = dict(rooms)
    while ends := [room for room, imported in left.items() if not imported & left.keys()]:
        for room in ends:
            del left[room]
    return sorted(left)


def test_no_arrow_between_rooms_of_tiers_runs_up() -> None:
    rooms = _rooms()
    assert {"slab", "hierarchy", "cache_server", "assemble"} <= rooms.keys()
    assert _in_circles(rooms) == [], "move what both need into a room below them"


def test_the_rule_of_tier_imports_sees_a_circle() -> None:
    assert _in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
