# SPDX-License-Identifier: Apache-2.0
"""`LLM.chat` with pictures: PIL images and data: URLs, against transformers in float64."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stratakv import engine
from stratakv.engine import LLM, SamplingParams
from stratakv.engine.request.pictures import MAX_PICTURES

from .picture_model import FAMILIES, Part, PictureModel, draw_picture, make_picture_model, url_of

NUM_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
WIDE, TALL = draw_picture(40, 90, 1), draw_picture(64, 30, 2)
TEXT = {"type": "text", "text": "hello"}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PictureModel:
    return PictureModel(make_picture_model(tmp_path_factory.mktemp("pictures"), request.param))


@pytest.fixture(scope="module")
def llm(model: PictureModel) -> Iterator[LLM]:
    with LLM(model.path, num_blocks=300, max_num_seqs=4, num_threads=1, dtype="float64") as made:
        yield made


def chat_of(parts: Sequence[Part], kind: str = "image") -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        if kind == "image_url"
        else {"type": kind, kind: part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("kind", ["image", "image_pil", "image_url"])
def test_answers_are_those_of_transformers(model: PictureModel, llm: LLM, kind: str) -> None:
    chats: list[list[Part]] = [[WIDE, "what is it?"], ["is ", WIDE, " like ", TALL, "?"], ["no"]]
    made = llm.chat([chat_of(parts, kind) for parts in chats], GREEDY)
    for parts, answer in zip(chats, made, strict=True):
        tokens, prompt_tokens = model.answer(parts, NUM_TOKENS)
        assert answer.outputs[0].token_ids == tokens
        assert len(answer.prompt_token_ids) == prompt_tokens


def test_several_answers_share_a_picture(model: PictureModel, llm: LLM) -> None:
    parts: list[Part] = [TALL, "say"]
    several = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, n=3)
    [made] = llm.chat(chat_of(parts), several)
    tokens, _ = model.answer(parts, NUM_TOKENS)
    assert [choice.token_ids for choice in made.outputs] == [tokens] * 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK"])
def test_images_of_all_modes_are_read(model: PictureModel, llm: LLM, mode: str) -> None:
    """The processors of transformers put transparent images on white."""
    image = WIDE.convert(mode)
    if mode in ("RGBA", "LA"):
        alpha = np.arange(40 * 90).reshape(40, 90) % 256
        image.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    parts: list[Part] = ["see ", image]
    [made] = llm.chat(chat_of(parts), GREEDY)
    assert made.outputs[0].token_ids == model.answer(parts, NUM_TOKENS)[0]
    assert image.mode == mode, "the caller's image is as it was"


BAD_PARTS: list[tuple[Any, str]] = [
    ({"type": "image", "image": "a.png"}, "must be a PIL image, not 'a.png'"),
    ({"type": "image"}, "must be a PIL image, not None"),
    ({"type": "image", "image": np.zeros((99, 9, 3))}, "image, not <class 'numpy.ndarray'>"),
    ({"type": "image", "image": Image.new("RGB", (0, 0))}, "cannot be read: it has 0 x 0 pixels"),
    ({"type": "image", "image": Image.new("RGB", (17_000, 1))}, "sides of up to 16384"),
    ({"type": "image_url", "image_url": "https://a.b/c.png"}, "reads data: URLs only"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "no PNG, JPEG"),
    ({"type": "image_url", "image_url": {}}, "without `image_url.url`"),
    ({"type": "video", "video": "a.mp4"}, "a part of the type video"),
]


@pytest.mark.parametrize(("part", "words"), BAD_PARTS)
def test_parts_that_cannot_be_read_are_named(llm: LLM, part: dict[str, Any], words: str) -> None:
    chat = [{"role": "user", "content": [TEXT, part]}]
    with pytest.raises(ValueError, match=r"conversation 0: .*content") as told:
        llm.chat(chat, GREEDY)
    assert words in str(told.value) and "messages[0].content[1]" in str(told.value)


def test_too_many_pictures_and_forged_ones_are_refused(model: PictureModel, llm: LLM) -> None:
    small = Image.new("RGB", (16, 16))
    with pytest.raises(ValueError, match=r"[0-9]{4} pictures and tiles"):
        llm.chat(chat_of([small] * (MAX_PICTURES + 1)), GREEDY)
    for parts in (["a " + model.placeholder], [small, model.placeholder]):
        with pytest.raises(ValueError, match="stands for a picture"):
            llm.chat(chat_of(parts), GREEDY)


def test_text_models_refuse_pictures(tiny_model: Path) -> None:
    chat = chat_of([Image.new("RGB", (16, 16))])
    refused = pytest.raises(ValueError, match="a part of the type image; models read text here")
    with LLM(tiny_model, num_blocks=20, num_threads=1) as text_model, refused:
        text_model.chat(chat, GREEDY, chat_template="{{ messages }}")


def test_the_program_of_the_page_runs(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text()
    _, program = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    assert 'LLM("HuggingFaceTB/' in program
    WIDE.save(tmp_path / "picture.png")
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "LLM", lambda _: nullcontext(llm))
    runpy.run_path("program.py")
    assert capsys.readouterr().out not in ("", "None\n")
