# SPDX-License-Identifier: Apache-2.0
"""A small random Qwen2.5-VL: its checkpoint; its processor and template are those of Qwen3-VL."""

from __future__ import annotations

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from .qwen_pictures import (
    BEGIN,
    END,
    PATCH,
    PLACEHOLDER,
    SHOWN,
    SPECIAL,
    TEMPLATE,
    VIDEO,
    process,
    write_processor,
)

__all__ = ["PLACEHOLDER", "SHOWN", "SPECIAL", "TEMPLATE", "new_model", "process", "write_processor"]


def new_model(vocab_size: int, token_of: dict[str, int]) -> Qwen2_5_VLForConditionalGeneration:
    vision = {
        "hidden_size": 48, "intermediate_size": 64, "depth": 4, "num_heads": 4,
        "patch_size": PATCH, "out_hidden_size": 64, "window_size": 3 * 2 * PATCH,
        "fullatt_block_indexes": [1, 3],
    }  # fmt: skip
    text = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "eos_token_id": token_of["</s>"],
        "bos_token_id": token_of["<s>"], "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
        },
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        image_token_id=token_of[PLACEHOLDER], video_token_id=token_of[VIDEO],
        vision_start_token_id=token_of[BEGIN], vision_end_token_id=token_of[END],
        vision_config=vision, text_config=text,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)
