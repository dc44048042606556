# SPDX-License-Identifier: Apache-2.0
"""The tensors of an encoder of pictures, and the memory that it needs. This module needs no
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..checkpoint.tensor_shapes import expected_tensors
from ..model_spec import ModelSpec
from .vision_spec import VisionSpec

PROJECTION = "connector.modality_projection.proj.weight"
Shapes = dict[str, tuple[int, ...]]


def vision_tensors(spec: VisionSpec, text_hidden: int) -> Shapes:
    """Return the name and shape of each tensor of the encoder."""
    hidden, middle, patch = spec.hidden_size, spec.intermediate_size, spec.patch_size
    places = (spec.image_size // patch) ** 2
    if spec.kind == "tiles":
        return {
            "embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
            "embeddings.patch_embedding.bias": (hidden,),
            "embeddings.position_embedding.weight": (places, hidden),
            "post_layernorm.weight": (hidden,),
            "post_layernorm.bias": (hidden,),
            PROJECTION: (text_hidden, hidden * spec.shuffle**2),
        } | _with_biases(
            {
                f"encoder.layers.{layer}.{name}": shape
                for layer in range(spec.num_layers)
                for name, shape in {
                    "self_attn.q_proj": (hidden, hidden),
                    "self_attn.k_proj": (hidden, hidden),
                    "self_attn.v_proj": (hidden, hidden),
                    "self_attn.out_proj": (hidden, hidden),
                    "mlp.fc1": (middle, hidden),
                    "mlp.fc2": (hidden, middle),
                    "layer_norm1": (hidden,),
                    "layer_norm2": (hidden,),
                }.items()
            }
        )
    if spec.kind == "windows":
        return _windowed_tensors(spec, text_hidden)
    joined = hidden * spec.shuffle**2
    parts: Shapes = {"patch_embed.proj": (hidden, 3, spec.frames, patch, patch)}
    for layer in range(spec.num_layers):
        parts |= {
            f"blocks.{layer}.attn.qkv": (3 * hidden, hidden),
            f"blocks.{layer}.attn.proj": (hidden, hidden),
            f"blocks.{layer}.mlp.linear_fc1": (middle, hidden),
            f"blocks.{layer}.mlp.linear_fc2": (hidden, middle),
            f"blocks.{layer}.norm1": (hidden,),
            f"blocks.{layer}.norm2": (hidden,),
        }
    mergers = {"merger": hidden}
    mergers |= {f"deepstack_merger_list.{n}": joined for n in range(len(spec.deep_layers))}
    for name, normed in mergers.items():
        parts |= {
            f"{name}.norm": (normed,),
            f"{name}.linear_fc1": (joined, joined),
            f"{name}.linear_fc2": (text_hidden, joined),
        }
    return {"pos_embed.weight": (places, hidden)} | _with_biases(parts)


def _windowed_tensors(spec: VisionSpec, text_hidden: int) -> Shapes:
    hidden, middle, patch = spec.hidden_size, spec.intermediate_size, spec.patch_size
    joined = hidden * spec.shuffle**2
    norms: Shapes = {"merger.ln_q.weight": (hidden,)}
    parts: Shapes = {"merger.mlp.0": (joined, joined), "merger.mlp.2": (text_hidden, joined)}
    for layer in range(spec.num_layers):
        norms |= {f"blocks.{layer}.norm{n}.weight": (hidden,) for n in (1, 2)}
        parts |= {
            f"blocks.{layer}.attn.qkv": (3 * hidden, hidden),
            f"blocks.{layer}.attn.proj": (hidden, hidden),
            f"blocks.{layer}.mlp.gate_proj": (middle, hidden),
            f"blocks.{layer}.mlp.up_proj": (middle, hidden),
            f"blocks.{layer}.mlp.down_proj": (hidden, middle),
        }
    patches = {"patch_embed.proj.weight": (hidden, 3, spec.frames, patch, patch)}
    return patches | norms | _with_biases(parts)


def _with_biases(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {f"{name}.weight": shape for name, shape in shapes.items()} | {
        f"{name}.bias": shape[:1] for name, shape in shapes.items()
    }


def weight_shapes(spec: ModelSpec) -> Shapes:
    """Return the name and shape of each tensor of a model, with those of its encoder."""
    shapes = dict(expected_tensors(spec))
    if spec.vision is not None:
        ours = vision_tensors(spec.vision, spec.hidden_size)
        shapes |= {f"vision.{name}": shape for name, shape in ours.items()}
    return shapes


def largest_side(spec: VisionSpec) -> int:
    """Return the side, in pixels, of the largest square picture or tile in whole tokens."""
    unit = spec.pixels_of_token
    return max(math.isqrt(spec.most_pixels) // unit, 1) * unit


def encoder_bytes(spec: VisionSpec, element_bytes: int) -> int:
    """Return the bytes that encoding the largest picture needs, besides the weights."""
    pixels = largest_side(spec) ** 2
    # Of each patch: its input and output, normed rows, queries, keys, values and mixed heads.
    of_patch = 8 * spec.hidden_size + 2 * spec.intermediate_size
    of_pixels = 3 * pixels * (4 + 4 + spec.frames * (4 + element_bytes))
    return pixels // spec.patch_size**2 * of_patch * element_bytes + of_pixels
