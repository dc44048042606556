# SPDX-License-Identifier: Apache-2.0
"""TextPart: multimodal models. Their text part is served; `vision/` reads the pictures of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of a multimodal model. Its configuration is `text_config` in config.json; its
    tensors' names have a prefix (`checkpoint/tensor_shapes.py`)."""

    model_type: str  # of the whole model
    architectures: tuple[str, ...]  # rows of FAMILIES; the first if text_config names none
    # Whether config.json may have the fields of the text part beside those of the whole model.
    may_be_flat: bool = False


TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart("gemma3", ("Gemma3ForCausalLM",)),
    "Idefics3ForConditionalGeneration": TextPart("idefics3", ("LlamaForCausalLM",)),
    "SmolVLMForConditionalGeneration": TextPart("smolvlm", ("LlamaForCausalLM",)),
    "Mistral3ForConditionalGeneration": TextPart(
        "mistral3", ("MistralForCausalLM", "Ministral3ForCausalLM")
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        "qwen2_5_vl", ("Qwen2_5_VLForCausalLM",), may_be_flat=True
    ),
    "Qwen3VLForConditionalGeneration": TextPart("qwen3_vl", ("Qwen3VLForCausalLM",)),
    "Qwen3_5ForConditionalGeneration": TextPart("qwen3_5", ("Qwen3_5ForCausalLM",)),
    "Qwen3_5MoeForConditionalGeneration": TextPart("qwen3_5_moe", ("Qwen3_5MoeForCausalLM",)),
}
