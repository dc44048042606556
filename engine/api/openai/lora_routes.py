# SPDX-License-Identifier: Apache-2.0
"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: load and unload LoRA adapters while the
server runs. The routes exist only with `--lora-dir`, and read adapters from that folder only."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ....tiers.settings.format import format_value
from ....tiers.settings.values import ConfigError
from ...config.lora_config import adapter_name
from ...request.core_messages import CallRefused
from ..api_errors import ApiError
from ..front import Front
from .request.body import read_request
from .response.streaming import before


class LoadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter. The last two fields are vLLM's, and are optional here."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool | None = None
    lora_int_id: int | None = None


class UnloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


_load_decoder = msgspec.json.Decoder(LoadRequest)
_unload_decoder = msgspec.json.Decoder(UnloadRequest)


async def load_adapter(front: Front, http: Request) -> ASGIApp:
    request, _ = await read_request(http, front.settings, _load_decoder)
    try:
        name = adapter_name("lora_name", request.lora_name)
    except ConfigError as error:
        raise ApiError(str(error), param="lora_name", code="invalid_value") from None
    assert front.settings.lora_dir is not None
    try:
        folder = folder_within(front.settings.lora_dir, request.lora_path)
    except ValueError as error:
        raise ApiError(str(error), param="lora_path", code="invalid_value") from None
    try:
        load = front.adapters.load_adapter(
            front.client, name, folder, replaces=request.load_inplace
        )
        loaded = await before(load, None, front.in_flight.ended)
    except TimeoutError as error:
        raise ApiError(str(error), status=504, kind="timeout_error", code="timeout") from None
    except ValueError as error:
        message = f"the adapter `{name}` was not loaded: {error}"
        code = error.code if isinstance(error, CallRefused) else ""
        param = "lora_name" if code else "lora_path"
        raise ApiError(message, param=param, code=code or "invalid_adapter") from None
    return Response(msgspec.json.encode(loaded), media_type="application/json")


async def unload_adapter(front: Front, http: Request) -> ASGIApp:
    request, _ = await read_request(http, front.settings, _unload_decoder)
    name = request.lora_name
    try:
        await front.adapters.unload_adapter(front.client, name)
    except ValueError as error:
        raise ApiError(
            str(error), status=404, param="lora_name", code="adapter_not_found"
        ) from None
    return Response(msgspec.json.encode({"unloaded": name}), media_type="application/json")


def folder_within(base: Path, given: str) -> Path:
    """Return the folder `given`, a path below `base`, with links resolved. Raises ValueError if the
    folder is not below `base`, or contains a link to a file outside of `base`."""
    root = base.resolve()
    try:
        folder = (root / given).resolve()
        is_inside = folder != root and folder.is_relative_to(root) and folder.is_dir()
        files = list(folder.iterdir()) if is_inside else []
        leads_out = any(not each.resolve().is_relative_to(root) for each in files)
    except (OSError, ValueError, RuntimeError):  # no permission, a zero byte, a loop of links
        is_inside, leads_out = False, False
    if not is_inside:
        raise ValueError(f"{format_value(given)} is no folder in the server's --lora-dir")
    if leads_out:
        raise ValueError(f"{format_value(given)} has links to files outside of --lora-dir")
    return folder
