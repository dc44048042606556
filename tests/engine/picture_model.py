# SPDX-License-Identifier: Apache-2.0
"""A small random SmolVLM, and the answers of transformers to texts with pictures, in float64."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.pictures.picture_processor import expand_placeholders, place_items
from stratakv.engine.pictures.tile_processor import TileProcessor, load_tile_processor
from stratakv.engine.request.pictures import Picture

Part = str | Image.Image
TILE, TOKENS_OF_TILE = 32, 4
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": TILE},
    "do_image_splitting": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.4, 0.6],
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_AROUND, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
_SPECIAL = ["<s>", "</s>", _IMAGE, _AROUND, _WHOLE, "<end_of_utterance>"]


def draw_picture(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def url_of(picture: Image.Image) -> str:
    """A `data:` URL of it, without loss."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_picture_model(directory: Path) -> Path:
    """Save a checkpoint with processor, tokenizer and template; the directory."""
    special = [*_SPECIAL, *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5))]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    shown = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(shown))
    processor = {"image_processor_type": "SmolVLMImageProcessor", **PROCESSOR}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    end = tokenizer.token_to_id("</s>")
    text = {
        "model_type": "llama", "vocab_size": len(letters) + len(special), "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "eos_token_id": end, "bos_token_id": tokenizer.token_to_id("<s>"), "pad_token_id": end,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": 8, "image_size": TILE,
    }  # fmt: skip
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            image_token_id=tokenizer.token_to_id(_IMAGE),
            scale_factor=2,
            vision_config=vision,
            text_config=text,
            pad_token_id=end,
            tie_word_embeddings=False,
        )
    )
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

    @cached_property
    def processor(self) -> TileProcessor:
        vision = load_model_spec(self.path).vision
        assert vision is not None
        return load_tile_processor(self.path, vision)

    @cached_property
    def reference(self) -> SmolVLMForConditionalGeneration:
        model = SmolVLMForConditionalGeneration.from_pretrained(self.path, dtype=torch.float64)
        return model.eval()

    def prompt_of(self, parts: Sequence[Part]) -> tuple[list[int], list[Picture]]:
        """The tokens of a chat of one message, and its pictures with their places."""
        text = "".join(part if isinstance(part, str) else _IMAGE for part in parts)
        pictures = [self.processor.process(part) for part in parts if not isinstance(part, str)]
        tokens = self._encode(expand_placeholders(_chat(text), pictures, _IMAGE))
        token_id = self.tokenizer.token_to_id(_IMAGE)
        return tokens, place_items(np.asarray(tokens, np.int32), pictures, token_id)

    @torch.inference_mode()
    def answer(self, parts: Sequence[Part], num_tokens: int) -> tuple[list[int], int]:
        """The greedy answer of transformers, and the length of its prompt."""
        inputs, text = _process(parts)
        prompt = torch.tensor([self._encode(_chat(text))])
        out = self.reference(input_ids=prompt, use_cache=True, **inputs)
        answer = [int(out.logits[0, -1].argmax())]
        while len(answer) < num_tokens:
            last = torch.tensor([answer[-1:]])
            out = self.reference(input_ids=last, past_key_values=out.past_key_values)
            answer.append(int(out.logits[0, -1].argmax()))
        return answer, prompt.shape[1]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _chat(text: str) -> str:
    return f"User: {text}<end_of_utterance>\nAssistant:"


def _process(parts: Sequence[Part]) -> tuple[dict[str, torch.Tensor], str]:
    """The inputs that transformers makes of the pictures, and the text with their tokens."""
    pictures = [part for part in parts if not isinstance(part, str)]
    if not pictures:
        return {}, "".join(part for part in parts if isinstance(part, str))
    made = load_their_processor()([pictures], return_tensors="pt", return_row_col_info=True)
    cuts = iter(zip(made["rows"][0], made["cols"][0], strict=True))
    text = "".join(
        part
        if isinstance(part, str)
        else get_image_prompt_string(*next(cuts), TOKENS_OF_TILE, _AROUND, _IMAGE, _WHOLE)
        for part in parts
    )
    mask = made["pixel_attention_mask"]
    return {"pixel_values": made["pixel_values"].double(), "pixel_attention_mask": mask}, text


@lru_cache(maxsize=1)
def load_their_processor() -> SmolVLMImageProcessorPil:
    return SmolVLMImageProcessorPil(**PROCESSOR)
