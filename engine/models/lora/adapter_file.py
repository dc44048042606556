# SPDX-License-Identifier: Apache-2.0
"""AdapterFile: the matrices of a LoRA adapter in PEFT's format, checked against a model.

The weight file is read once, so the fingerprint covers the same bytes that the model computes with.
The fingerprint covers everything that can change a token (names, scales, types, shapes, numbers).
The adapter's name, its folder and the order of its target modules do not change the fingerprint."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cbor2
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ....tiers.settings.format import format_name
from ....tiers.settings.sizes import show_size
from ....tiers.settings.values import ConfigError
from ..checkpoint.files import is_there
from ..checkpoint.tensor_shapes import expected_tensors, name_of
from ..model_spec import ModelSpec
from .adapted_names import adapted_tensors
from .peft_config import PeftConfig, read_peft_config
from .peft_targets import DOWN, GATE_UP, INNER

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
MAX_FILE_BYTES = 16 << 30
_FINGERPRINT = "stratakv.lora.1"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_OTHER_TENSORS = (
    (".lora_embedding_", "an adapter of an embedding"),
    (".lora_magnitude_vector", "DoRA"),
    (".bias", "a bias"),
    ("base_layer.weight", "whole weights of the base model"),
)


class Module(NamedTuple):
    """The adapter matrices of one module; with experts, their first axis is the expert."""

    ins: Tensor  # [rank, in]
    outs: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The modules of an adapter, each by the name of the model tensor that the module changes."""

    modules: Mapping[str, Module]
    fingerprint: bytes  # 32 bytes
    rank: int  # the largest rank of a module
    num_bytes: int

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec, max_rank: int) -> AdapterFile:
        """Read the adapter in a folder. Raises ConfigError, which names the file and the item, if
        the adapter does not fit the model, is no plain LoRA, or has a rank above `max_rank`."""
        config = read_peft_config(folder)
        stored = _load(folder)
        return _Reader(folder, spec, max_rank, config).read(stored)


def _load(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not is_there(path):
        if is_there(folder / _PICKLE_FILE):
            raise ConfigError(
                f"{folder / _PICKLE_FILE} is a pickle, which may run code when it is read; save "
                f"the adapter as {WEIGHTS_FILE} (PEFT does unless told otherwise)"
            )
        raise ConfigError(f"{path} is missing; give the folder in which PEFT saved the adapter")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise ConfigError(
                    f"{path} has {show_size(size)} and at most {show_size(MAX_FILE_BYTES)} are "
                    "read; give an adapter"
                )
            data = file.read()
        return load(data)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); make it readable, or copy the adapter again"
        ) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a whole safetensors file ({error}); copy the adapter again"
        ) from error


class _Reader:
    """A check of the tensors of one adapter against the model."""

    def __init__(self, folder: Path, spec: ModelSpec, max_rank: int, config: PeftConfig) -> None:
        self._path, self._spec, self._config = folder / WEIGHTS_FILE, spec, config
        self._max_rank = max_rank
        self._name_of = name_of(spec)
        self._joined = expected_tensors(spec)
        # The names and shapes as if each expert had separate tensors; other tensors are the same.
        apart = expected_tensors(spec, ("",)) if spec.experts is not None else self._joined
        adapted = adapted_tensors(spec)
        self._shapes = {name: shape for name, shape in apart.items() if name in adapted}

    def read(self, stored: Mapping[str, Tensor]) -> AdapterFile:
        pairs = self._pairs(stored)
        if not pairs:
            raise ConfigError(f"{self._path} holds no matrices of LoRA; give another adapter")
        self._config.check_count(len(pairs))
        ignored = self._config.targets.find_ignored(sorted(pairs))
        if ignored is not None:
            raise self._fault(
                ignored,
                f"is not computed by PEFT: {self._config.where} has {self._config.targets}; remove "
                "its tensors, or correct these fields",
            )
        modules: dict[str, Module] = {}
        for module, (ins, outs) in sorted(pairs.items()):
            name, made = self._module(module, ins, outs)
            if name in modules:
                raise self._fault(module, "adapts a matrix that another module of it adapts too")
            modules[name] = made
        return AdapterFile(
            modules,
            _fingerprint(modules),
            max(each.ins.shape[-2] for each in modules.values()),
            sum(each.ins.nbytes + each.outs.nbytes for each in modules.values()),
        )

    def _pairs(self, stored: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in stored.items():
            found = _TENSOR.fullmatch(name)
            if found is None:
                parts = (what for part, what in _OTHER_TENSORS if part in name)
                what = next(parts, "no matrix of LoRA")
                raise ConfigError(
                    f"{self._path} holds {format_name(name)}, which is {what}"
                    "; such adapters are not computed here: merge it into its base model"
                )
            module, half = found.groups()
            if half in halves.setdefault(module, {}):
                raise self._fault(module, f"has lora_{half} twice")
            if tensor.dtype not in _FLOATS or tensor.dim() != 2 or 0 in tensor.shape:
                raise self._fault(
                    module,
                    f"has lora_{half} of {tensor.dtype} {list(tensor.shape)}; two dimensions of "
                    "float64, float32, bfloat16 or float16 are read",
                )
            if not bool(torch.isfinite(tensor).all()):
                raise self._fault(
                    module,
                    f"has numbers in lora_{half} that are not finite; give an adapter whose "
                    "training went well",
                )
            halves[module][half] = tensor
        for module, half in halves.items():
            if len(half) == 1:
                missing = "B" if "A" in half else "A"
                raise self._fault(module, f"lacks lora_{missing}; copy the adapter again")
        return {module: (half["A"], half["B"]) for module, half in halves.items()}

    def _module(self, module: str, ins: Tensor, outs: Tensor) -> tuple[str, Module]:
        """Return the name of the tensor that a module changes, and the checked `Module`."""
        name = self._name_of(f"{module}.weight")
        if name is not None and name in self._shapes:
            return name, self._plain(module, ins, outs, self._shapes[name])
        found = self._experts_name(module)
        if found is not None:
            return found, self._experts(module, found, ins, outs)
        if name in self._joined:
            raise self._fault(
                module,
                "is a part of the model that is not adapted here; train without it, or merge the "
                "adapter",
            )
        raise self._fault(module, "is none of this model; give an adapter that was trained on it")

    def _plain(self, module: str, ins: Tensor, outs: Tensor, shape: tuple[int, ...]) -> Module:
        num_outs, num_ins = shape
        strength = self._config.strength_of(module)
        rank = len(ins) if ins.shape[1] == num_ins else strength.rank
        for half, tensor, wanted in (
            ("A", ins, (rank, num_ins)), ("B", outs, (num_outs, rank)),
        ):  # fmt: skip
            if tensor.shape != wanted:
                raise self._fault(
                    module,
                    f"has lora_{half} {list(tensor.shape)} and this model needs {list(wanted)}; "
                    "give an adapter of this model",
                )
        self._check_rank(module, rank, strength.rank)
        return Module(ins, outs, strength.scale)

    def _experts_name(self, module: str) -> str | None:
        """Return the name of the joined tensor of all experts that a module changes, or None. Of
        two tensors in one module, PEFT names the first, gate and up, with `.base_layer`."""
        bare = module.removesuffix(INNER)
        gate_up, down = (self._name_of(f"{bare}.{part}") for part in (GATE_UP, DOWN))
        if gate_up not in self._joined or down not in self._joined:
            return None
        is_first = bare != module or self._config.targets.parts_of(bare) == [GATE_UP]
        return gate_up if is_first else down

    def _experts(self, module: str, name: str, ins: Tensor, outs: Tensor) -> Module:
        """Check the matrices of all experts. `lora_A` has rows `[expert, rank]`, and `lora_B` has
        columns `[rank, expert]`. Files of older PEFT versions have inputs and outputs exchanged."""
        count, num_outs, num_ins = self._joined[name]
        part = name.rpartition(".")[2]
        parameter = f"{module.removesuffix(INNER)}.{part}"
        rank = len(ins) // count
        of_experts = count * rank
        is_turned = (ins.shape, outs.shape) == ((of_experts, num_outs), (num_ins, of_experts))
        is_usual = (ins.shape, outs.shape) == ((of_experts, num_ins), (num_outs, of_experts))
        if not (is_usual or is_turned) or not rank:
            raise self._fault(
                module,
                f"has lora_A {list(ins.shape)} and lora_B {list(outs.shape)}, and for {count} "
                f"experts this model needs {[of_experts, num_ins]} and {[num_outs, of_experts]}; "
                "give an adapter of this model",
            )
        told, scale = self._config.strength_of(parameter)
        self._check_rank(module, rank, told)
        by_expert = ins.view(count, rank, -1)
        outs_by_expert = outs.view(len(outs), rank, count).permute(2, 0, 1)
        if is_usual:
            return Module(by_expert, outs_by_expert, scale)
        return Module(outs_by_expert.transpose(1, 2), by_expert.transpose(1, 2), scale)

    def _check_rank(self, module: str, rank: int, told: int) -> None:
        if rank > self._max_rank:
            raise self._fault(
                module,
                f"has rank {rank} and --max-lora-rank is {self._max_rank}; raise that",
            )
        if rank != told:
            raise self._fault(
                module, f"has rank {rank}, and {self._config.where} says {told}; copy it again"
            )

    def _fault(self, module: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: the module {format_name(module)} {what}")


def _fingerprint(modules: Mapping[str, Module]) -> bytes:
    digest = hashlib.sha256()
    for name, module in sorted(modules.items()):
        parts = [
            [str(each.dtype), list(each.shape), _digest_of(each)]
            for each in (module.ins, module.outs)
        ]
        digest.update(cbor2.dumps([_FINGERPRINT, name, module.scale, parts], canonical=True))
    return digest.digest()


def _digest_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()
