# SPDX-License-Identifier: Apache-2.0
"""Names that moved are told or taken: modules, what other packages implement, and tickets of older
nodes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from stratakv.engine.request.handover_ticket import params_digest
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.policies import RequestQueue
from stratakv.engine.text.tool_calls.base import Output

ROOT = Path(__file__).parents[1]
MOVED: dict[str, str] = json.loads((ROOT / "engine" / "moved_modules.json").read_text())


def test_the_table_is_that_of_the_page() -> None:
    files = (ROOT / "docs" / "moves.md").read_text().partition("## Methods")[0]
    rows = re.findall(r"^\| `([\w/]+)\.py` \| `([\w/]+)\.py`", files, re.MULTILINE)
    assert {old.replace("/", "."): new.replace("/", ".") for old, new in rows} == MOVED
    for place in MOVED.values():
        assert (ROOT / place.replace(".", "/")).with_suffix(".py").exists(), place


@pytest.mark.parametrize("name", ["tiers.context", "engine.sampling_params", "connector.economics"])
def test_the_import_of_a_module_that_moved_says_where_it_is(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as told:
        importlib.import_module(f"stratakv.{name}")
    assert str(told.value) == f"stratakv.{name} is stratakv.{MOVED[name]} now (docs/moves.md)"
    assert told.value.name == f"stratakv.{name}"


def test_the_import_of_what_never_was_fails_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'stratakv\.tiers\.nothing'$"):
        importlib.import_module("stratakv.tiers.nothing")


class OldQueue(RequestQueue):
    """A queue of another package, with the method's name of before 2026-11-28."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def prepend(self, request: Request) -> None:
        self.requests.insert(0, request)

    def remove(self, request: Request) -> bool:
        if request not in self.requests:
            return False
        self.requests.remove(request)
        return True

    def first(self) -> Request | None:
        return self.requests[0] if self.requests else None

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.requests)


def test_a_queue_with_the_older_name_of_its_method_is_taken() -> None:
    queue, request = OldQueue(), Request("a", [1], SamplingParams())
    queue.add(request)
    assert queue.remove_request(request)
    assert not queue.remove_request(request)


def test_a_parser_may_call_the_older_name_of_its_output() -> None:
    output = Output()
    output.add_content("words")
    assert output.take(is_last=True).content == "words"


# Digests of e6f71553, of 2026-11-28: nodes of that day take tickets of today's, and give them.
DIGESTS = {
    "04aa38da8cabe7f66cac85d252c7b37a": SamplingParams(),
    "f20b75c2160fd9a1ca8116926511788b": SamplingParams(temperature=0.7, seed=3),
}


@pytest.mark.parametrize("digest", DIGESTS)
def test_tickets_of_older_nodes_fit(digest: str) -> None:
    assert params_digest(DIGESTS[digest]) == digest
