# SPDX-License-Identifier: Apache-2.0
"""A small random SmolVLM: its checkpoint, and what transformers makes of pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

PLACEHOLDER, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SHOWN = PLACEHOLDER  # the text that the template writes for a picture
SPECIAL = [
    "<s>", "</s>", PLACEHOLDER, AROUND, WHOLE, "<end_of_utterance>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)),
]  # fmt: skip
TILE, TOKENS_OF_TILE = 32, 4
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": TILE},
    "do_image_splitting": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.4, 0.6],
}
TYPE = "SmolVLMImageProcessor"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}.\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def new_model(vocab_size: int, token_of: dict[str, int]) -> SmolVLMForConditionalGeneration:
    end = token_of["</s>"]
    text = {
        "model_type": "llama", "vocab_size": vocab_size, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "eos_token_id": end, "bos_token_id": token_of["<s>"], "pad_token_id": end,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": 8, "image_size": TILE,
    }  # fmt: skip
    config = SmolVLMConfig(
        image_token_id=token_of[PLACEHOLDER], scale_factor=2, vision_config=vision,
        text_config=text, pad_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    return SmolVLMForConditionalGeneration(config)


@lru_cache(maxsize=1)
def load_their_processor() -> SmolVLMImageProcessorPil:
    return SmolVLMImageProcessorPil(**PROCESSOR)


def process(pictures: Sequence[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The inputs that transformers makes of the pictures, and their texts in the prompt."""
    return process_tiles(load_their_processor(), pictures)


def process_tiles(
    processor: Any, pictures: Sequence[Image.Image]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    made = processor([list(pictures)], return_tensors="pt", return_row_col_info=True)
    texts = [
        get_image_prompt_string(rows, columns, TOKENS_OF_TILE, AROUND, PLACEHOLDER, WHOLE)
        for rows, columns in zip(made["rows"][0], made["cols"][0], strict=True)
    ]
    mask = made["pixel_attention_mask"]
    return {"pixel_values": made["pixel_values"].double(), "pixel_attention_mask": mask}, texts


def write_processor(directory: Path, **changes: Any) -> None:
    fields = {"image_processor_type": TYPE, **PROCESSOR, **changes}
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
