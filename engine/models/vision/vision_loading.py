# SPDX-License-Identifier: Apache-2.0
"""Loads the encoder of pictures from the files of a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.checkpoint import CPU, Checkpoint
from .encoder import VisionEncoder
from .siglip import EncoderLayerWeights, EncoderWeights, TileEncoder
from .vision_spec import VisionSpec

_PREFIXES = ("model.vision_model.", "vision_model.")
_CONNECTORS = ("model.connector.", "connector.")
_PROJECTION = "connector.modality_projection.proj.weight"


def load_vision_encoder(
    path: Path, spec: VisionSpec, text_hidden: int, dtype: torch.dtype, device: torch.device = CPU
) -> VisionEncoder:
    """Read the encoder's weights to `device`. The text part of the model has `text_hidden` columns.
    Raises ConfigError with the name of a missing, unknown or misshapen tensor or file."""
    with Checkpoint(path, device, _name_here) as checkpoint:
        checkpoint.check_expected(vision_tensors(spec, text_hidden))
        return TileEncoder(spec, _Reader(checkpoint, spec, dtype).read_all())


def vision_tensors(spec: VisionSpec, text_hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of the encoder."""
    hidden, middle = spec.hidden_size, spec.intermediate_size
    places = (spec.image_size // spec.patch_size) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (hidden, 3, spec.patch_size, spec.patch_size),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": (places, hidden),
        "post_layernorm.weight": (hidden,),
        "post_layernorm.bias": (hidden,),
        _PROJECTION: (text_hidden, hidden * spec.shuffle**2),
    }
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.out_proj": (hidden, hidden),
        "mlp.fc1": (middle, hidden),
        "mlp.fc2": (hidden, middle),
        "layer_norm1": (hidden,),
        "layer_norm2": (hidden,),
    }
    for layer in range(spec.num_layers):
        for name, shape in matrices.items():
            shapes[f"encoder.layers.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layers.{layer}.{name}.bias"] = shape[:1]
    return shapes


def _name_here(stored: str) -> str | None:
    """Map a stored name to the name here; None: the tensor is of another part."""
    for prefix in _PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    for prefix in _CONNECTORS:
        if stored.startswith(prefix):
            return "connector." + stored.removeprefix(prefix)
    return None


class _Reader:
    """Makes the weights of an encoder from its tensors."""

    def __init__(self, checkpoint: Checkpoint, spec: VisionSpec, dtype: torch.dtype) -> None:
        self._checkpoint, self._spec, self._dtype = checkpoint, spec, dtype

    def read_all(self) -> EncoderWeights:
        read = self._read
        return EncoderWeights(
            read("embeddings.patch_embedding.weight"),
            read("embeddings.patch_embedding.bias"),
            read("embeddings.position_embedding.weight"),
            [self._layer(f"encoder.layers.{layer}.") for layer in range(self._spec.num_layers)],
            (read("post_layernorm.weight"), read("post_layernorm.bias")),
            read(_PROJECTION),
        )

    def _layer(self, at: str) -> EncoderLayerWeights:
        read = self._read
        qkv, qkv_bias = (
            torch.cat([read(f"{at}self_attn.{part}_proj.{kind}") for part in "qkv"])
            for kind in ("weight", "bias")
        )
        return EncoderLayerWeights(
            (read(f"{at}layer_norm1.weight"), read(f"{at}layer_norm1.bias")),
            qkv,
            qkv_bias,
            read(f"{at}self_attn.out_proj.weight"),
            read(f"{at}self_attn.out_proj.bias"),
            (read(f"{at}layer_norm2.weight"), read(f"{at}layer_norm2.bias")),
            read(f"{at}mlp.fc1.weight"),
            read(f"{at}mlp.fc1.bias"),
            read(f"{at}mlp.fc2.weight"),
            read(f"{at}mlp.fc2.bias"),
        )

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name, self._dtype)
