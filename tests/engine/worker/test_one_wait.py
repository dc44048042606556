# SPDX-License-Identifier: Apache-2.0
"""A step waits for the device once, for its answer.

The step runs on torch's meta device, whose tensors have a shape and hold nothing: reading one
raises. Beside it a watcher refuses what a GPU would do by waiting: copies back, copies there that
are not queued, and operations on tensors of both places. What kernels would launch is left out;
what they check of their arguments is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stratakv.engine.models import layers
from stratakv.engine.models.decoder import Decoder
from stratakv.engine.models.layers import Linear
from stratakv.engine.sampling import copies, sampler
from stratakv.engine.worker.kv_pool import KvPool
from stratakv.engine.worker.runtime import runtimes
from stratakv.engine.worker.runtime.device_runtime import HostRuntime
from stratakv.engine.worker.runtime.placement import Placement
from stratakv.kernels.attention import paged_decode, paged_prefill
from stratakv.kernels.kernel_choice import TRITON
from stratakv.kernels.write import write_kv

GPU = torch.device("meta")  # stands for one


@pytest.fixture(autouse=True)
def plain_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is built on the CPU and then moved: its matrices are to be those of a GPU."""
    monkeypatch.setattr(layers, "reason_against_matrices", lambda *_: "on a GPU")


class Waited(AssertionError):
    """Something other than the answer made the host wait, or would fail on a GPU."""


class Watcher(TorchDispatchMode):
    """Sees every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {tensor.device.type for tensor in tensors if tensor.dim()}
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.copy_:
            self._check_copy(args[1], args[0].device, len(args) > 2 and args[2])
        elif func.overloadpacket is torch.ops.aten._to_copy:
            self._check_copy(args[0], result.device, kwargs.get("non_blocking", False))
        elif len(places) > 1:
            raise Waited(f"{func} of tensors in both places")
        return result

    @staticmethod
    def _check_copy(source: Tensor, target: torch.device, is_queued: bool) -> None:
        if source.device.type == GPU.type and target.type == "cpu":
            raise Waited("a copy back")
        if source.device.type == "cpu" and target.type == GPU.type and not is_queued:
            raise Waited("a copy there that is not queued")


class FakeGpu(HostRuntime):
    """A queue that takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.device = GPU
        self.can_record = True


def there(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)


def move_model(model: Decoder) -> None:
    """Its tensors, replaced by such on the GPU."""

    def linear(old: Linear) -> Linear:
        return Linear(there(old._weight), None if old._bias is None else there(old._bias))

    for name in ("_embedding", "_last_norm"):
        setattr(model, name, there(getattr(model, name)))
    model._tables = [(there(cos), there(sin)) for cos, sin in model._tables]
    model._head = linear(model._head)
    for part in (part for layer in model._layers for part in (layer, layer._mixer, layer._mlp)):
        for name in part.__slots__:
            value = getattr(part, name)
            if isinstance(value, Linear):
                setattr(part, name, linear(value))
            elif isinstance(value, Tensor):
                setattr(part, name, there(value))


class Fetches:
    """Stands for the one way back; gives zeros, of host memory, for what would come."""

    def __init__(self) -> None:
        self.count = 0
        self.is_short = False

    def __call__(self, tensors: Sequence[Tensor]) -> Fetch:
        assert all(tensor.device == GPU for tensor in tensors)
        return Fetch(self, tensors)

    def wait(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.count += 1
        found = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        found[1].fill_(True)  # the logits are finite
        if self.is_short:
            found[2].fill_(True)
        self.is_short = False
        return found


class Fetch(NamedTuple):
    """One answer on its way."""

    fetches: Fetches
    tensors: Sequence[Tensor]

    def wait(self) -> list[Tensor]:
        return self.fetches.wait(self.tensors)


@contextmanager
def on_a_gpu(
    drive: Any, monkeypatch: pytest.MonkeyPatch, placement: Placement
) -> Iterator[Fetches]:
    """The driver's runner, moved to a GPU that is not there."""
    runner, fetches = drive.runner, Fetches()
    monkeypatch.setattr(copies, "page_locked", lambda tensor: tensor)
    monkeypatch.setattr(sampler, "begin_to_host", fetches)
    monkeypatch.setattr(copies, "begin_to_host", fetches)
    monkeypatch.setattr(
        sampler.Sampler, "_uniform", lambda self, to: np.zeros(len(to.rows), np.float64)
    )
    launched = []
    for module in (paged_decode, paged_prefill, write_kv):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "choose_kernel", lambda *_, **__: TRITON)
        monkeypatch.setattr(
            f"{module.__name__}_triton.{name}_triton",
            lambda *_, **options: launched.append(1),
        )
    move_model(runner.model)
    pool = object.__new__(KvPool)
    pool.layout, pool.tensor = runner.pool.layout, there(runner.pool.tensor)
    pool.kernel_layout, pool.kernel_tensor = pool.layout, pool.tensor
    pool.entries_per_block = 1
    runner._forward = runtimes.make_forward(
        FakeGpu(),
        runner.model,
        pool.pages_of(runner.groups),
        placement,
        torch.bfloat16,
        max_model_len=1024,
        max_tokens=4096,
        max_requests=16,
        progress=print,
    )
    with Watcher():
        yield fetches
    assert launched


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_every_step_waits_once(is_recorded, kv, checkpoint, driver, prompt_of, monkeypatch):
    placement = Placement(device=GPU, kv_cache_dtype=kv, record_decodes=is_recorded)
    drive = driver(checkpoint(), dtype="bfloat16", placement=Placement(kv_cache_dtype=kv))
    drive.runner.model.logits = Decoder.logits.__get__(drive.runner.model)
    wishes = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3},
        {"temperature": 0.7, "min_p": 0.1, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.9, "logit_bias": ((5, 2.0),), "min_tokens": 3, "stop_token_ids": (7,)},
        {"temperature": 0.0, "bad_words_token_ids": ((4,), (5, 6))},
    ]
    with on_a_gpu(drive, monkeypatch, placement) as fetches:
        for number, wish in enumerate(wishes):
            drive.add(f"r{number}", prompt_of(3 + 9 * number, number), **wish)
            drive.step(chunk=20)
        for _ in range(2):  # the last prompt takes three steps
            drive.step(chunk=20)
        for _ in range(4):
            before = fetches.count
            result = drive.step(chunk=20)
            assert not result.nan_request_ids and all(result.sampled_token_ids.values())
            assert fetches.count == before + 1
        assert fetches.count == len(wishes) + 6


def test_prompts_that_answer_nothing_yet_wait_for_nothing(
    checkpoint, driver, prompt_of, monkeypatch
):
    drive = driver(checkpoint(), dtype="bfloat16")
    drive.runner.model.logits = Decoder.logits.__get__(drive.runner.model)
    with on_a_gpu(drive, monkeypatch, Placement(device=GPU)) as fetches:
        drive.add("a", prompt_of(60), prompt_logprobs=None)
        drive.step(chunk=20)
        drive.step(chunk=20)
        assert fetches.count == 0
        drive.step(chunk=20)
        assert fetches.count == 1


@pytest.mark.parametrize("chunk", [20, 1])
def test_a_prompt_of_embeddings_waits_for_nothing(
    chunk, checkpoint, driver, prompt_of, monkeypatch
):
    drive = driver(checkpoint(), dtype="bfloat16")
    drive.runner.model.logits = Decoder.logits.__get__(drive.runner.model)
    with on_a_gpu(drive, monkeypatch, Placement(device=GPU)) as fetches:
        drive.add("a", [0] * 41, np.ones((41, 32), np.float32))
        drive.add("b", prompt_of(50))
        for _ in range(40 // chunk):
            drive.step(chunk)
        assert fetches.count == 0
        drive.step(chunk)
        assert fetches.count == 1


def test_the_rare_draw_that_needs_more_candidates_waits_twice(
    checkpoint, driver, prompt_of, monkeypatch
):
    """Only where the vocabulary has more words than top-p looks at first."""
    drive = driver(checkpoint(vocab_size=300), dtype="bfloat16")
    drive.runner.model.logits = Decoder.logits.__get__(drive.runner.model)
    with on_a_gpu(drive, monkeypatch, Placement(device=GPU)) as fetches:
        drive.add("a", prompt_of(6), temperature=1.0, top_p=0.99)
        drive.step()
        assert fetches.count == 1
        fetches.is_short = True
        drive.step()
        assert fetches.count == 3


def test_the_watcher_sees_what_waits():
    array = np.arange(3)
    with Watcher():
        tensor = torch.zeros(3, device=GPU)
        for read in (lambda: tensor.sum().item(), tensor.tolist, tensor.cpu, tensor.nonzero):
            with pytest.raises((Waited, RuntimeError, NotImplementedError)):
                read()
        with pytest.raises(Waited, match="not queued"):
            torch.from_numpy(array).to(GPU)
        with pytest.raises(Waited, match="both places"):
            tensor[torch.from_numpy(array)]
