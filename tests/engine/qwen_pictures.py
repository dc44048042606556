# SPDX-License-Identifier: Apache-2.0
"""A small random Qwen3-VL: its checkpoint, and what transformers makes of pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PLACEHOLDER, BEGIN, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
VIDEO = "<|video_pad|>"
SHOWN = BEGIN + PLACEHOLDER + END  # the text that the template writes for a picture
SPECIAL = ["<s>", "</s>", PLACEHOLDER, BEGIN, END, VIDEO]
PATCH, MERGE = 8, 2
PROCESSOR: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "size": {"shortest_edge": 1024, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.4, 0.6],
}
TYPE = "Qwen2VLImageProcessorFast"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% endif %}{% endfor %}.\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def new_model(vocab_size: int, token_of: dict[str, int]) -> Qwen3VLForConditionalGeneration:
    vision = {
        "hidden_size": 48, "intermediate_size": 64, "depth": 4, "num_heads": 4,
        "patch_size": PATCH, "out_hidden_size": 64, "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "eos_token_id": token_of["</s>"],
        "bos_token_id": token_of["<s>"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    config = Qwen3VLConfig(
        image_token_id=token_of[PLACEHOLDER], video_token_id=token_of[VIDEO],
        vision_start_token_id=token_of[BEGIN], vision_end_token_id=token_of[END],
        vision_config=vision, text_config=text,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config)


@lru_cache(maxsize=1)
def load_their_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**PROCESSOR)


def process(pictures: Sequence[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The inputs that transformers makes of the pictures, and their texts in the prompt."""
    made = load_their_processor()(list(pictures), return_tensors="pt")
    grids = made["image_grid_thw"]
    texts = [BEGIN + PLACEHOLDER * (int(grid.prod()) // MERGE**2) + END for grid in grids]
    return {"pixel_values": made["pixel_values"].double(), "image_grid_thw": grids}, texts


def write_processor(directory: Path, **changes: Any) -> None:
    fields = {"image_processor_type": TYPE, **PROCESSOR, **changes}
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
