# SPDX-License-Identifier: Apache-2.0
"""Small random models that read pictures, and the answers of transformers, in float64."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText

from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.pictures.processors.known_processors import load_processor
from stratakv.engine.pictures.processors.picture_processor import (
    PictureProcessor,
    expand_placeholders,
    place_items,
)
from stratakv.engine.request.pictures import Picture

from . import idefics3_pictures, qwen_pictures, smolvlm_pictures, windowed_qwen_pictures

FAMILIES: dict[str, ModuleType] = {
    "smolvlm": smolvlm_pictures,
    "idefics3": idefics3_pictures,
    "qwen2_5_vl": windowed_qwen_pictures,
    "qwen3_vl": qwen_pictures,
}
KINDS = ("smolvlm", "qwen2_5_vl", "qwen3_vl")  # one family for each kind of encoder
Part = str | Image.Image


def draw_picture(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def url_of(picture: Image.Image) -> str:
    """A `data:` URL of it, without loss."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_picture_model(directory: Path, family: str = "smolvlm") -> Path:
    """Save a checkpoint with processor, tokenizer and template; the directory."""
    made = FAMILIES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in made.SPECIAL]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    shown = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": made.TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(shown))
    made.write_processor(directory)
    torch.manual_seed(0)
    token_of = {name: tokenizer.token_to_id(name) for name in made.SPECIAL}
    model = made.new_model(len(letters) + len(special), token_of)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


class PictureModel:
    """The checkpoint in `path`: prompts for StrataKV, and what transformers answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        kind = json.loads((path / "config.json").read_text())["model_type"]
        self.family = FAMILIES[kind]
        self.placeholder: str = self.family.PLACEHOLDER

    @cached_property
    def processor(self) -> PictureProcessor:
        vision = load_model_spec(self.path).vision
        assert vision is not None
        return load_processor(self.path, vision)

    @cached_property
    def reference(self) -> Any:
        model = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float64)
        return model.eval()

    def prompt_of(self, parts: Sequence[Part]) -> tuple[list[int], list[Picture]]:
        """The tokens of a chat of one message, and its pictures with their places."""
        shown = self._chat(parts, [self.family.SHOWN] * len(parts))
        pictures = [
            self.processor.process_picture(part) for part in parts if not isinstance(part, str)
        ]
        tokens = self._encode(expand_placeholders(shown, pictures, self.placeholder))
        token_id = self.tokenizer.token_to_id(self.placeholder)
        prompt, placed = place_items(np.asarray(tokens, np.int32), pictures, token_id)
        return prompt.tolist(), placed

    @torch.inference_mode()
    def answer(self, parts: Sequence[Part], num_tokens: int) -> tuple[list[int], int]:
        """The greedy answer of transformers, and the length of its prompt."""
        pictures = [part for part in parts if not isinstance(part, str)]
        inputs, texts = self.family.process(pictures) if pictures else ({}, [])
        prompt = torch.tensor([self._encode(self._chat(parts, texts))])
        if "image_grid_thw" in inputs:
            token_id = self.tokenizer.token_to_id(self.placeholder)
            inputs["mm_token_type_ids"] = (prompt == token_id).int()
        self.reference.model.rope_deltas = None  # of the prompt before
        out = self.reference(input_ids=prompt, use_cache=True, **inputs)
        answer = [int(out.logits[0, -1].argmax())]
        while len(answer) < num_tokens:
            last = torch.tensor([answer[-1:]])
            out = self.reference(input_ids=last, past_key_values=out.past_key_values)
            answer.append(int(out.logits[0, -1].argmax()))
        return answer, prompt.shape[1]

    def _chat(self, parts: Sequence[Part], texts: Sequence[str]) -> str:
        of_pictures = iter(texts)
        text = "".join(part if isinstance(part, str) else next(of_pictures) for part in parts)
        return f"User: {text}.\nAssistant:"

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids
