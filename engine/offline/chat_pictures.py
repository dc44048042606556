# SPDX-License-Identifier: Apache-2.0
"""`ChatPictures`: reads the pictures in conversations for `LLM.chat`.

A picture is a PIL image, in a part of the type `image` or `image_pil` (the names of transformers
and of vLLM), or a `data:` URL in a part of the type `image_url`. `data:` URLs have the HTTP
server's limits. A PIL image is processed as by transformers: without metadata, and a transparent
image on a white ground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ...tiers.settings.format import format_value
from ..models.spec.spec_parser import load_model_spec
from ..pictures.picture_decoding import decode_picture, to_rgb_on_white
from ..pictures.picture_file import PictureLimits
from ..pictures.picture_sources import bytes_of_data_url
from ..pictures.processors.known_processors import load_processor
from ..pictures.processors.picture_processor import PictureProcessor, ProcessedPicture
from ..request.pictures import MAX_PICTURES

_FIELDS = {"image": "image", "image_pil": "image_pil"}
_URLS = {"image_url": "image_url", "input_image": "image_url"}
# A picture's part in the HTTP API's form. The URL is empty, because only the place is rendered.
_SHOWN = {"type": "image_url", "image_url": ""}


class ChatPictures:
    """Reads pictures for one model. `token_id`: the token of the model's picture placeholder."""

    def __init__(self, processor: PictureProcessor, token_id: int) -> None:
        self.processor, self.token_id = processor, token_id

    @classmethod
    def load(cls, path: Path) -> ChatPictures | None:
        """Return the reader for the model at `path`; None for a model that reads only text. Raises
        ConfigError for unsupported settings of the model."""
        spec = load_model_spec(path).vision
        return None if spec is None else cls(load_processor(path, spec), spec.token_id)

    def take_pictures(self, messages: Sequence[Any]) -> tuple[list[Any], list[ProcessedPicture]]:
        """Return the messages in the form of the HTTP API, and the messages' pictures in order.
        Raises ValueError with the place of a picture that cannot be read."""
        shown: list[Any] = []
        pictures: list[ProcessedPicture] = []
        for number, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if not isinstance(content, list | tuple):
                shown.append(message)
                continue
            parts = []
            for index, part in enumerate(content):
                picture = self._read_part(f"messages[{number}].content[{index}]", part)
                parts.append(part if picture is None else _SHOWN)
                pictures += [] if picture is None else [picture]
            shown.append({**message, "content": parts})
        num_items = sum(len(picture.items) for picture in pictures)
        if num_items > MAX_PICTURES:
            raise ValueError(
                f"the conversation has {num_items} pictures and tiles of pictures, and a prompt "
                f"has at most {MAX_PICTURES}; give fewer"
            )
        return shown, pictures

    def _read_part(self, place: str, part: Any) -> ProcessedPicture | None:
        """Return the picture of a content part; None for a part of another type."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            return None  # the renderer's checks refuse such a part
        try:
            if kind in _FIELDS:
                return self._process_image(part.get(_FIELDS[kind]))
            given = part.get(_URLS[kind]) if kind in _URLS else None
            url = given.get("url") if isinstance(given, Mapping) else given
            if not isinstance(url, str):
                return None
            if url[:5].lower() != "data:":
                raise ValueError("LLM.chat reads data: URLs only; open the file as a PIL image")
            return self.processor.process_picture(decode_picture(bytes_of_data_url(url)))
        except ValueError as error:
            raise ValueError(f"the picture `{place}` cannot be read: {error}") from None

    def _process_image(self, image: Any) -> ProcessedPicture:
        if not isinstance(image, Image.Image):
            given = image if image is None or isinstance(image, str) else type(image)
            raise ValueError(f"it must be a PIL image, not {format_value(given)}")
        PictureLimits().check_size(*image.size)
        return self.processor.process_picture(to_rgb_on_white(image))
