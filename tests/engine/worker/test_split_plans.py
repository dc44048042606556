# SPDX-License-Identifier: Apache-2.0
"""Decode under split plans, in the interpreter: the tokens of attention over gathered blocks, while
requests grow past tiles, come and end; a plan is sent when it changes."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="runs its interpreter")

from stratakv.engine.worker.forward import input_buffers, kernel_attention
from stratakv.engine.worker.forward.kernel_attention import Kernels
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.kernels.kernel_choice import TRITON

from ...kernels import interpreter, launch_guard, quick_interpreter
from .recording_runtime import RecordingRuntime

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter: TRITON_INTERPRET=1"
)

BY_KERNELS = Placement(attention_backend=KERNELS)
# A tile is 64 tokens, and a split two tiles or more: of four, of one, and of two at the end.
LENGTHS = {"long": 450, "short": 10, "growing": 126}
STEPS = 8


def answers(drive, prompt_of):
    """The tokens of all requests; one of them comes late, and one ends early."""
    said = {}
    for number, (name, length) in enumerate(LENGTHS.items()):
        drive.add(name, prompt_of(length, number))
        drive.step()
    for number in range(STEPS):
        drive.step()
        if number == STEPS // 2:
            said["short"] = drive.finish("short")
    return said | {name: drive.finish(name) for name in list(drive.lives)}


@pytest.mark.parametrize("is_recorded", [False, True])
def test_tokens_are_those_of_gathered_blocks(
    is_recorded, checkpoint, driver, prompt_of, monkeypatch
):
    expected = answers(driver(checkpoint(), dtype="float32"), prompt_of)
    quick_interpreter.install()
    interpreter.install()
    launch_guard.install()
    monkeypatch.setattr(kernel_attention, "choose_decode_kernel", lambda *_, **__: TRITON)
    monkeypatch.setattr(Kernels, "can_record_decodes", is_recorded)
    splits, sent = [], []
    lay_down = input_buffers._Splits.lay_down

    def noted(self, lengths, turn):
        sent.append(lay_down(self, lengths, turn))
        splits.append(int(self._planner.share(self._planner.tiles(lengths, None))))
        return sent[-1]

    drive = driver(
        checkpoint(), dtype="float32", placement=BY_KERNELS, runtime=RecordingRuntime(),
        max_num_seqs=4,
    )  # fmt: skip
    monkeypatch.setattr(input_buffers._Splits, "lay_down", noted)
    assert answers(drive, prompt_of) == expected
    assert max(splits) < 450 // 64, "the long context is cut"
    # Beside the steps in which a request comes or ends: one adds a tile to the growing request.
    assert sum(sent) < len(sent) - STEPS // 2
