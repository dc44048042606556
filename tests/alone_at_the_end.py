# SPDX-License-Identifier: Apache-2.0
"""How processes share the tests: file by file, and what measures time alone at the end.

A file stays in one process, because its tests share fixtures and some of them add up what others
counted. The tests that measure time run in the last process, after every other one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ALONE = "alone"  # the scope of all tests that run alone


class Numbered(list[str]):
    """Names of tests, each of which is found at once."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._numbers = {name: number for number, name in enumerate(names)}

    def index(self, name: str, *_: Any) -> int:
        return self._numbers[name]


class AloneAtTheEnd(LoadFileScheduling):
    """Hands out files in the order of collection, which has the tests that run alone last."""

    def __init__(self, config: Any, log: Any, runs_alone: Callable[[str], bool]) -> None:
        super().__init__(config, log)
        self._runs_alone = runs_alone

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = Numbered(collection)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Ended tests are forgotten: all that is kept is counted after each message of a
        process."""
        name = self.registered_collections[node][item_index]
        scope, work = self._split_scope(name), self.assigned_work[node]
        work[scope][name] = True
        if all(work[scope].values()):
            del work[scope]
        self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """What `node` has not ended goes to others, but for the test in which it crashed: that one
        would crash them too."""
        unfinished = {
            scope: tests
            for scope, unit in self.assigned_work[node].items()
            if (tests := {name: False for name, ended in unit.items() if not ended})
        }
        crashed_in = None
        if unfinished:
            scope = next(iter(unfinished))
            crashed_in = next(iter(unfinished[scope]))
            del unfinished[scope][crashed_in]
            if not unfinished[scope]:
                del unfinished[scope]
        self.assigned_work[node] = unfinished
        super().remove_node(node)
        for other in self.nodes:
            self._reschedule(other)
        return crashed_in

    def _split_scope(self, nodeid: str) -> str:
        return ALONE if self._runs_alone(nodeid) else super()._split_scope(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        # One that takes the place of another is given work when it has collected.
        if node in self.registered_collections:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if next(iter(self.workqueue)) == ALONE and len(self.nodes) > 1:
            # A process keeps its last test back until it is told to end or gets more, so the one
            # that stays waits here without working. It is called again when the others are gone.
            if any(not other.shutting_down for other in self.nodes if other is not node):
                node.shutdown()
            return
        # A process that has crashed is handed work until its end is read; `remove_node` takes it
        # back.
        with suppress(OSError):
            super()._assign_work_unit(node)
