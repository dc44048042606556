# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill beside other projects' kernels, on the same tensors in the same minute.

Peers come from the folder of `--peers`, appended to the path so that it never shadows what is
installed, or from what is installed. None has to be there: whatever a peer cannot do, gets wrong or
breaks on is a note. This section is the last one, because a kernel that breaks the device's context
takes everything after it along.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from functools import partial
from statistics import geometric_mean

from torch import Tensor

from ..place import Place, SectionOver
from ..plots import draw_peers
from ..section import Results, Row, Section, Target, one_line, run_cases
from ..stopwatch import time_launches
from . import decode, prefill
from .cases import Batch, Case, check_attention, decode_case, make_batch, time_checked
from .peer import FlashAttention3, FlashInfer, Peer, PeerRefused, TorchAttention, VllmTriton

NAME = "peers"
# FlashInfer last: it may compile for minutes, and the others should be through by then.
PEERS: tuple[type[Peer], ...] = (VllmTriton, FlashAttention3, TorchAttention, FlashInfer)
MAX_FAULTS = 3  # each may cost seconds of compiling


def choose_cases(place: Place) -> list[Case]:
    """Those of the targets, in bf16; prefill first, for two targets are about it."""
    if place.is_rehearsal:
        return [*prefill.choose_cases(place)[:2], *decode.choose_cases(place)[:2]]
    grid = [decode_case(name, requests, context) for name, requests, context in decode.GRID]
    if place.is_quick:
        return [*prefill.grid_cases(), *(c for c in grid if c.name in ("1k x 1", "8k x 64"))]
    return [*prefill.grid_cases(), Case(name="mixed", chunks=prefill.MIXED), *grid]


def run(place: Place, results: Results) -> None:
    """Ours on every case, then one peer after the other. Raises SectionOver, WrongResult."""
    cases = choose_cases(place)
    rows: dict[str, Row] = {}
    expected: dict[str, Tensor] = {}
    rounds = place.choose(7, 5, 3)

    def measure_ours(case: Case) -> None:
        batch = make_batch(place, case)
        expected[case.name] = batch.reference()
        seconds = time_checked(place, batch, expected[case.name], rounds=rounds).median
        rows[case.name] = {**case.describe(), "seconds": seconds, "peers": {}}
        rows[case.name]["kind"] = decode.NAME if case.is_decode else prefill.NAME
        results.add_row(NAME, rows[case.name])

    run_cases(place, results, NAME, cases, measure_ours)
    measured = [case for case in cases if case.name in rows]
    for peer in find_peers(place, results):
        faults = 0
        for case in measured:
            place.check_time()
            try:
                seconds = time_peer(place, case, peer, expected[case.name], rounds)
            except PeerRefused as refused:
                results.add_note(NAME, f"{peer.name}, {case.name}: {refused}")
            except SectionOver:
                raise
            except Exception as error:  # noqa: BLE001 - no fault of a peer's is one of ours
                results.add_note(NAME, f"{peer.name}, {case.name}: {one_line(error)}")
                check_device(place, peer)
                faults += 1
            else:
                rows[case.name]["peers"][peer.name] = seconds
                set_ratios(results, peer.name)
            place.release_memory()
            if faults == MAX_FAULTS:
                results.add_note(NAME, f"{peer.name}: left out after {faults} faults")
                break


def find_peers(place: Place, results: Results) -> list[Peer]:
    """Those that can be imported; a note for each. Appends the folder to the path for good: what
    is imported from it may import more of it later."""
    folder = None if place.peers is None else str(place.peers.resolve())
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    found = []
    for kind in PEERS:
        try:
            peer = kind()
        except PeerRefused as refused:
            results.add_note(NAME, f"{kind.name}: not measured, {refused}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code runs when imported
            results.add_note(NAME, f"{kind.name}: not measured, {one_line(error)}")
        else:
            found.append(peer)
            results.add_note(NAME, f"{peer.name}: {peer.remark}")
    return found


def time_peer(place: Place, case: Case, peer: Peer, expected: Tensor, rounds: int) -> float:
    """Seconds of one launch, on the tensors that ours had. Raises whatever the peer does."""
    batch: Batch = make_batch(place, case)
    launch = peer.prepare(batch)
    check_attention(f"{peer.name}, {case.name}", launch(0).reshape(expected.shape), expected)
    launches = [partial(launch, layer) for layer in range(len(batch.layers))]
    return time_launches(place, launches, rounds=rounds).median


def check_device(place: Place, peer: Peer) -> None:
    """After a fault of a peer's. Raises RuntimeError if the device can do nothing more."""
    try:
        place.synchronise()
    except RuntimeError as error:
        raise RuntimeError(
            f"{peer.name} left the device unusable ({one_line(error)}); "
            "leave it out of the folder of --peers"
        ) from error


def set_ratios(results: Results, name: str) -> None:
    """How many times faster than peer `name` we are, in decode and on the grid of prefill."""
    rows = [row for row in results.rows(NAME) if name in row["peers"]]
    in_prefill = [row for row in rows if row["case"] in prefill.GRID]
    in_decode = [row for row in rows if row["kind"] == decode.NAME]
    for kind, of_kind in ((prefill.NAME, in_prefill), (decode.NAME, in_decode)):
        if of_kind:
            results.set_ratio(f"{kind}_over_{name}", _speedup(of_kind, name))


def _speedup(rows: Iterable[Row], name: str) -> float:
    return geometric_mean([row["peers"][name] / row["seconds"] for row in rows])


SECTION = Section(
    NAME,
    "Peers",
    run,
    draw_peers,
    (
        Target(
            "prefill_over_peer_triton",
            "prefill, times faster than vLLM's Triton",
            least=2.0,
        ),
        Target("prefill_over_fa3", "prefill over FlashAttention-3", least=0.70),
    ),
)
