# SPDX-License-Identifier: Apache-2.0
"""A count of what one step of a model launches on a GPU, taken without one.

Tensors are torch's fake ones: they have a shape, a type and a CUDA device, and no memory, so a
model of any size costs nothing. An operator counts as one launch, however many kernels it takes;
views, sizes and new memory count as none. A kernel of Triton counts when it is launched, and is not
run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.models import rope
from stratakv.engine.models.checkpoint import weights
from stratakv.engine.models.decoder import Decoder
from stratakv.engine.models.dtypes import dtype_name
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.sampling import copies
from stratakv.engine.worker.block_table import BlockTable
from stratakv.engine.worker.forward.forward import StepForward, StepInputs
from stratakv.engine.worker.kv_pool import KvPool
from stratakv.engine.worker.runtime.device_runtime import HostRuntime
from stratakv.engine.worker.runtime.placement import Placement
from stratakv.engine.worker.runtime.runtimes import choose_layer_parts, make_forward
from stratakv.kernels.kernel_choice import Hardware

from .kernels.other_hardware import other_hardware

DEVICE = torch.device("cuda:0")
DTYPE = torch.bfloat16
H100 = Hardware("H100", (9, 0), has_triton=True)
MULTIPROCESSORS = 132
# Llama-3.1-8B but for its number of layers.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
BLOCK = 16

aten = torch.ops.aten
# New memory, and views that their schema does not call so.
NO_LAUNCHES = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view, aten._reshape_alias,
}  # fmt: skip
# Torch composes it of others where the device has no kernel for it; a GPU has one.
ONE_KERNEL = {aten._fused_rms_norm}


class DeviceLaunches(TorchDispatchMode):
    """Counts the operators on the device by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a size or a device
            return func(*args, **kwargs)
        if func.overloadpacket not in ONE_KERNEL:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not func.is_view and func.overloadpacket not in NO_LAUNCHES:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            is_there = any(tensor.device == DEVICE for tensor in (*made, *given))
            if is_there and any(tensor.numel() for tensor in made):
                self.counts[str(func.overloadpacket)] += 1
        return result

    @contextmanager
    def counting_kernels(self) -> Iterator[None]:
        """Triton's kernels are counted, too, and not run."""

        def launch_of(kernel: Any, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                self.counts[f"triton.{kernel.fn.__name__}"] += 1

            return launch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KernelInterface, "__getitem__", launch_of)
            yield


class WithoutDevice(TorchFunctionMode):
    """Indexes and copies by the operators that these lead to: torch first asks for the device's
    guard there, which a build for the CPU lacks. Tensors of the host are real until they are copied
    to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_THE_HOST and not is_fake(args[0]):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is Tensor.__getitem__:
            return indexed(*args)
        if func is Tensor.__setitem__:
            tensor, index, value = args
            return aten.copy_.default(indexed(tensor, index), value)
        if func is Tensor.copy_:
            return aten.copy_.default(args[0], as_fake(args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)


OF_THE_HOST = (Tensor.__getitem__, Tensor.__setitem__, Tensor.numpy)


def as_fake(tensor: Tensor) -> Tensor:
    """One without values of the same shape and type, on the host unless it is fake already."""
    return tensor if is_fake(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]`, for the indices that a model has."""
    if isinstance(index, Tensor):
        rows: Tensor = aten.index.Tensor(tensor, [index])
        return rows
    axis = 0
    items = index if isinstance(index, tuple) else (index,)
    for place, item in enumerate(items):
        if item is None:
            tensor = tensor.unsqueeze(axis)
        elif item is Ellipsis:
            axis = tensor.dim() - sum(each is not None for each in items[place + 1 :]) - 1
        elif isinstance(item, slice):
            if item != slice(None):
                tensor = aten.slice.Tensor(tensor, axis, item.start, item.stop, item.step or 1)
        else:
            tensor = tensor.select(axis, item)
            continue
        axis += 1
    return tensor


class FakeRuntime(HostRuntime):
    """The fake device's: its staging memory is real, since numpy writes there."""

    def __init__(self) -> None:
        super().__init__()
        self.device = DEVICE

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(*shape, dtype=dtype)


class FakeTensors:
    """Weights without values, in place of `weights.RandomTensors`."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, _: float
    ) -> None:
        self.device, self._shapes = device, shapes

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._shapes[name], dtype=dtype, device=self.device)


def fake_tables(
    rope: Any, head_dim: int, length: int, max_positions: int, dtype: torch.dtype, *_: Any
) -> tuple[Tensor, Tensor]:
    """Rotary tables without values: the real ones are looked at."""
    return torch.empty(length, head_dim // 2, dtype=dtype), torch.empty(
        length, head_dim // 2, dtype=dtype
    )


@contextmanager
def fake_gpu() -> Iterator[None]:
    """torch and the kernels find a GPU that is not there; tensors on it are fake."""
    cuda = {
        "device_of": lambda tensor: nullcontext(),
        "device": lambda device: nullcontext(),
        "get_device_capability": lambda device=None: H100.capability,
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=MULTIPROCESSORS
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in cuda.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(weights, "RandomTensors", FakeTensors)
        patch.setattr(rope, "rope_tables", fake_tables)
        patch.setattr(copies, "page_locked", as_fake)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with other_hardware(lambda: H100), torch.inference_mode(), fake, WithoutDevice():
            yield


def make_model(folder: Path, num_layers: int, max_model_len: int, max_requests: int) -> StepForward:
    """A model of `LLAMA_8B`'s shape and so many layers; to be called on the fake GPU."""
    config = LLAMA_8B | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    spec = load_model_spec(folder)
    groups = plan_groups(spec.layout(BLOCK, dtype_name(DTYPE)), 1, spec.layer_attention)
    placement = Placement(device=DEVICE, record_decodes=False, strict_kernels=True)
    parts = choose_layer_parts(spec, placement, DTYPE)
    model = Decoder.load(folder, spec, max_model_len, DTYPE, DEVICE, parts, is_random=True)
    return make_forward(
        FakeRuntime(),
        model,
        KvPool(groups.layout, 64, DEVICE).pages_of(groups),
        placement,
        DTYPE,
        max_model_len=max_model_len,
        max_tokens=2048,
        max_requests=max_requests,
        progress=lambda _: None,
    )


def step_of(computed: Sequence[int], counts: Sequence[int], max_model_len: int) -> StepInputs:
    """A step of requests that compute `counts` tokens behind `computed` ones, and choose one each.
    Their blocks are any."""
    requests, tokens = len(counts), sum(counts)
    table = BlockTable(requests, -(-max_model_len // BLOCK), BLOCK)
    for row, (before, count) in enumerate(zip(computed, counts, strict=True)):
        table.add_row([1] * -(-(before + count) // BLOCK), row)
    positions = [
        before + i for before, count in zip(computed, counts, strict=True) for i in range(count)
    ]
    return StepInputs(
        tables=[table],
        rows=np.arange(requests),
        computed=np.array(computed),
        counts=np.array(counts),
        token_ids=np.zeros(tokens, np.int64),
        positions=np.array(positions),
        slots=[np.array(positions)],
        wanted=np.cumsum(counts) - 1,
    )


def count_launches(forward: StepForward, step: StepInputs) -> Counter[str]:
    """Launches of a step, by operator; to be called on the fake GPU."""
    launches = DeviceLaunches()
    with launches, launches.counting_kernels():
        forward.prepare_step(step)()
    return launches.counts
