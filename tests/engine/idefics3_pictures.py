# SPDX-License-Identifier: Apache-2.0
"""A small random Idefics3: as the small SmolVLM, with the classes of Idefics3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from PIL import Image
from transformers import Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from . import smolvlm_pictures as smolvlm
from .smolvlm_pictures import PLACEHOLDER, SHOWN, SPECIAL, TEMPLATE

__all__ = ["PLACEHOLDER", "SHOWN", "SPECIAL", "TEMPLATE", "new_model", "process", "write_processor"]


def new_model(vocab_size: int, token_of: dict[str, int]) -> Idefics3ForConditionalGeneration:
    like = smolvlm.new_model(vocab_size, token_of).config
    config = Idefics3Config(
        image_token_id=like.image_token_id, scale_factor=like.scale_factor,
        vision_config=like.vision_config.to_dict() | {"model_type": "idefics3_vision"},
        text_config=like.text_config.to_dict(), pad_token_id=like.pad_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Idefics3ForConditionalGeneration(config)


@lru_cache(maxsize=1)
def load_their_processor() -> Idefics3ImageProcessorPil:
    return Idefics3ImageProcessorPil(**smolvlm.PROCESSOR)


def process(pictures: Sequence[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The inputs that transformers makes of the pictures, and their texts in the prompt."""
    return smolvlm.process_tiles(load_their_processor(), pictures)


def write_processor(directory: Path) -> None:
    fields = {"image_processor_type": "Idefics3ImageProcessor", **smolvlm.PROCESSOR}
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
