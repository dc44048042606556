# SPDX-License-Identifier: Apache-2.0
"""Loads the encoder of pictures from the files of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.checkpoint import CPU, Checkpoint
from .encoder import VisionEncoder
from .encoder_layer import EncoderLayerWeights
from .grid_encoder import GridEncoder, GridWeights, MergerWeights
from .tile_encoder import EncoderWeights, TileEncoder
from .vision_shapes import PROJECTION, vision_tensors
from .vision_spec import VisionSpec

# The prefixes of stored names, with those here.
_TILES = {
    "model.vision_model.": "",
    "vision_model.": "",
    "model.connector.": "connector.",
    "connector.": "connector.",
}
_GRID = {"model.visual.": "", "visual.": ""}


def load_vision_encoder(
    path: Path, spec: VisionSpec, text_hidden: int, dtype: torch.dtype, device: torch.device = CPU
) -> VisionEncoder:
    """Read the encoder's weights to `device`. The text part of the model has `text_hidden` columns.
    Raises ConfigError with the name of a missing, unknown or misshapen tensor or file."""
    has_tiles = spec.kind == "tiles"
    prefixes = _TILES if has_tiles else _GRID
    with Checkpoint(path, device, lambda stored: _name_here(stored, prefixes)) as checkpoint:
        checkpoint.check_expected(vision_tensors(spec, text_hidden))
        reader = _Reader(checkpoint, spec, dtype)
        if has_tiles:
            return TileEncoder(spec, reader.read_tiles())
        windowed = spec.kind == "windows"
        return GridEncoder(spec, reader.read_windowed() if windowed else reader.read_grid())


def _name_here(stored: str, prefixes: Mapping[str, str]) -> str | None:
    """Map a stored name to the name here; None: the tensor is of another part."""
    for prefix, ours in prefixes.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return None


class _Reader:
    """Makes the weights of an encoder from its tensors."""

    def __init__(self, checkpoint: Checkpoint, spec: VisionSpec, dtype: torch.dtype) -> None:
        self._checkpoint, self._spec, self._dtype = checkpoint, spec, dtype

    def read_tiles(self) -> EncoderWeights:
        return EncoderWeights(
            *self._pair("embeddings.patch_embedding"),
            self._read("embeddings.position_embedding.weight"),
            [self._tile_layer(f"encoder.layers.{n}.") for n in range(self._spec.num_layers)],
            self._pair("post_layernorm"),
            self._read(PROJECTION),
        )

    def read_grid(self) -> GridWeights:
        return GridWeights(
            *self._pair("patch_embed.proj"),
            self._read("pos_embed.weight"),
            [self._grid_layer(f"blocks.{n}.") for n in range(self._spec.num_layers)],
            self._read_merger("merger."),
            [
                self._read_merger(f"deepstack_merger_list.{n}.")
                for n in range(len(self._spec.deep_layers))
            ],
        )

    def read_windowed(self) -> GridWeights:
        return GridWeights(
            self._read("patch_embed.proj.weight"),
            None,
            None,
            [self._windowed_layer(f"blocks.{n}.") for n in range(self._spec.num_layers)],
            MergerWeights(
                (self._read("merger.ln_q.weight"), None),
                *self._pair("merger.mlp.0"),
                *self._pair("merger.mlp.2"),
            ),
            [],
        )

    def _windowed_layer(self, at: str) -> EncoderLayerWeights:
        return EncoderLayerWeights(
            (self._read(f"{at}norm1.weight"), None),
            *self._pair(f"{at}attn.qkv"),
            *self._pair(f"{at}attn.proj"),
            (self._read(f"{at}norm2.weight"), None),
            *self._pair(f"{at}mlp.up_proj"),
            *self._pair(f"{at}mlp.down_proj"),
            *self._pair(f"{at}mlp.gate_proj"),
        )

    def _tile_layer(self, at: str) -> EncoderLayerWeights:
        qkv, qkv_bias = (
            torch.cat([self._read(f"{at}self_attn.{part}_proj.{kind}") for part in "qkv"])
            for kind in ("weight", "bias")
        )
        return EncoderLayerWeights(
            self._pair(f"{at}layer_norm1"),
            qkv,
            qkv_bias,
            *self._pair(f"{at}self_attn.out_proj"),
            self._pair(f"{at}layer_norm2"),
            *self._pair(f"{at}mlp.fc1"),
            *self._pair(f"{at}mlp.fc2"),
        )

    def _grid_layer(self, at: str) -> EncoderLayerWeights:
        return EncoderLayerWeights(
            self._pair(f"{at}norm1"),
            *self._pair(f"{at}attn.qkv"),
            *self._pair(f"{at}attn.proj"),
            self._pair(f"{at}norm2"),
            *self._pair(f"{at}mlp.linear_fc1"),
            *self._pair(f"{at}mlp.linear_fc2"),
        )

    def _read_merger(self, at: str) -> MergerWeights:
        return MergerWeights(
            self._pair(f"{at}norm"),
            *self._pair(f"{at}linear_fc1"),
            *self._pair(f"{at}linear_fc2"),
        )

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self._read(f"{name}.weight"), self._read(f"{name}.bias")

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name, self._dtype)
