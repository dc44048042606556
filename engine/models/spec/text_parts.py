# SPDX-License-Identifier: Apache-2.0
"""TextPart: the text part of a multimodal model, which is served; `vision/` encodes pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of a multimodal model. Its configuration is `text_config` in config.json; its
    tensors' names have a prefix (`checkpoint/tensor_shapes.py`)."""

    model_type: str  # the model_type of the whole multimodal model
    architectures: tuple[str, ...]  # keys of FAMILIES; the first if text_config names none


TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart("gemma3", ("Gemma3ForCausalLM",)),
    "Idefics3ForConditionalGeneration": TextPart("idefics3", ("LlamaForCausalLM",)),
    "SmolVLMForConditionalGeneration": TextPart("smolvlm", ("LlamaForCausalLM",)),
    "Mistral3ForConditionalGeneration": TextPart(
        "mistral3", ("MistralForCausalLM", "Ministral3ForCausalLM")
    ),
    "Qwen3VLForConditionalGeneration": TextPart("qwen3_vl", ("Qwen3VLForCausalLM",)),
    "Qwen3_5ForConditionalGeneration": TextPart("qwen3_5", ("Qwen3_5ForCausalLM",)),
    "Qwen3_5MoeForConditionalGeneration": TextPart("qwen3_5_moe", ("Qwen3_5MoeForCausalLM",)),
}
