# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: the routes, and the checks and error answers of routes.

`http_server.py` runs the application. Handlers are plain ASGI applications below FastAPI, because
FastAPI's validation and response classes cost more time per request than decoding a prompt does."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import __version__
from ...tiers.settings.suggestions import did_you_mean
from ..client.base import UNHEALTHY_FAILED_STEPS, EngineClient, EngineDead
from ..request.core_messages import LoadedAdapter
from ..request.pooling import Dimensions
from ..request.sampling_params import SamplingParams
from ..text.reasoning import ReasoningMarks
from ..text.tokenizer import Tokenizer
from ..text.tool_calls.tool_formats import find_tool_parser, make_tool_format
from .api_errors import ENGINE, ApiError, ClientGone, error_response, to_api_error
from .api_settings import LORA_ROUTES, ApiSettings, CrossOrigin
from .chat_template import ChatTemplate
from .front import Front
from .http.api_key import HEALTH_PATH, NODE_PATH, ApiKeyMiddleware
from .http.hosts import HostMiddleware
from .http.http_protocol import PARTS_PATH
from .metrics.engine_metrics import Metrics
from .openai.chat import create_chat_completion
from .openai.completion_parts import create_completion_of_parts
from .openai.completions import create_completion
from .openai.embeddings import create_embeddings
from .openai.follow import FOLLOW
from .openai.lora_routes import load_adapter, unload_adapter
from .openai.parts_socket import PartsSocket
from .openai.request.body import MAX_QUOTED_CHARACTERS
from .openai.response.replies import ModelCard, ModelList, now
from .openai.tokenization import detokenize, tokenize
from .picture_reader import PictureReader
from .token_texts import TokenTexts

logger = logging.getLogger(__name__)

Handler = Callable[[Front, Request], Awaitable[ASGIApp]]

METRICS_PATH = "/metrics"
DEV_ROUTES = ("/reset_prefix_cache", "/pause", "/resume", "/is_paused")
# Routes of OpenAI's API and other APIs that this server lacks, each with the text of the error.
NOT_BUILT: Mapping[str, str] = {
    **{
        f"/v1/{name}": f"OpenAI's API of {what} is not built here"
        for name, what in (
            ("responses", "responses"), ("conversations", "conversations"),
            ("assistants", "assistants"), ("threads", "assistants"), ("audio", "speech"),
            ("images", "images"), ("videos", "videos"), ("moderations", "moderations"),
            ("files", "files"), ("uploads", "files"), ("batches", "batches"),
            ("fine_tuning", "fine-tuning"), ("vector_stores", "vector stores"),
            ("realtime", "realtime sessions"), ("evals", "evaluations"),
        )
    },
    "/v1/messages": "Anthropic's API is not built here",
    "/api": "Ollama's API is not built here",
    **dict.fromkeys(
        ("/v1/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"),
        "scores and ranks are not built here",
    ),
}  # fmt: skip
RESETS = ("pool", "all")
PAUSES = ("new", "all")
NODE_OBJECT = "stratakv.node"  # the `object` field of the answer at NODE_PATH
NONE = "none"
NO_DEFAULTS: Mapping[str, float | int] = MappingProxyType({})
CLIENT_CLOSED_REQUEST = 499  # the status, only in logs, of a request whose client has disconnected


def create_app(
    client: EngineClient,
    *,
    model_name: str,
    model_path: Path,
    model_aliases: Sequence[str] = (),
    tokenizer: Tokenizer | None,
    settings: ApiSettings | None = None,
    default_sampling: Mapping[str, float | int] = NO_DEFAULTS,
    marks: ReasoningMarks | None = None,
    check_params: Callable[[SamplingParams], None] = lambda params: None,
    pooling: str = "last",
    tool_call_parser: str = "",
    chat_template: ChatTemplate | None = None,
) -> FastAPI:
    """Return the application for one engine. The caller must close `client` after use.

    `app.state.in_flight` counts the requests that are being answered, and can end the answers.
    `app.state.pictures`, unless None, has a pool that the caller must close. `model_aliases` are
    paths that clients may send as `model`, besides `model_name`. `default_sampling` has values for
    fields that a client leaves out. `marks` delimit the model's thoughts; if given, chats return
    thoughts separately from the text. `check_params` raises ValueError for parameters that a logits
    processor refuses. `pooling` is the kind of pooling for embeddings. `tool_call_parser` names the
    parser of tool calls; if empty, the chat template determines the parser. `chat_template`
    replaces the model's own. Raises ConfigError for an unusable chat template or parser."""
    settings = settings or ApiSettings()
    if chat_template is None and tokenizer is not None:
        chat_template = ChatTemplate.load(model_path, tokenizer)
    template = chat_template
    shown = None if template is None else template.tools_source
    parser = find_tool_parser(tool_call_parser, shown)
    front = Front(
        client,
        model_name,
        tokenizer,
        template,
        settings,
        Metrics(model_name),
        default_sampling,
        TokenTexts(tokenizer),
        tuple(model_aliases),
        marks,
        make_tool_format(parser, tokenizer, marks),
        check_params,
        pooling,
        Dimensions.load(model_path),
        pictures=PictureReader.load(model_path, settings),
    )
    routes = [
        _route("/v1/completions", ["POST"], front, create_completion, counted=True),
        _route(PARTS_PATH, ["POST"], front, create_completion_of_parts, counted=True),
        _route("/v1/chat/completions", ["POST"], front, create_chat_completion, counted=True),
        _route("/v1/embeddings", ["POST"], front, create_embeddings, counted=True),
        *[
            _route(FOLLOW + path, ["POST"], front, partial(create, follows=True))
            for path, create in (
                ("/v1/completions", create_completion),
                ("/v1/chat/completions", create_chat_completion),
            )
        ],
        _route("/v1/models", ["GET"], front, partial(_list_models, created=now())),
        _route("/v1/models/{name:path}", ["GET"], front, partial(_one_model, created=now())),
        _route("/tokenize", ["POST"], front, tokenize),
        _route("/detokenize", ["POST"], front, detokenize),
        _route(HEALTH_PATH, ["GET"], front, _health),
        _route(NODE_PATH, ["GET"], front, _node),
        _route("/ping", ["GET", "POST"], front, _health),
        _route("/load", ["GET"], front, _load),
        _route(METRICS_PATH, ["GET"], front, _metrics),
        _route("/version", ["GET"], front, _version),
        _route("/server_info", ["GET"], front, _server_info),
    ]
    if settings.enable_dev_routes:
        routes += [
            _route("/reset_prefix_cache", ["POST"], front, _reset_prefix_cache),
            _route("/pause", ["POST"], front, _pause),
            _route("/resume", ["POST"], front, partial(_call, "resume")),
            _route("/is_paused", ["GET"], front, partial(_call, "paused")),
        ]
    if settings.lora_dir is not None:
        routes += [
            _route(LORA_ROUTES[0], ["POST"], front, load_adapter),
            _route(LORA_ROUTES[1], ["POST"], front, unload_adapter),
        ]
    # FastAPI's generated documentation is off, because it would show no fields of these handlers.
    socket = WebSocketRoute(PARTS_PATH, PartsSocket(front))
    app = FastAPI(title="StrataKV", version=__version__, openapi_url=None, routes=[*routes, socket])
    app.router.redirect_slashes = False
    app.state.in_flight, app.state.pictures = front.in_flight, front.pictures
    app.add_exception_handler(HTTPException, partial(_answer_http_exception, routes))
    if settings.api_key is not None:
        open_paths = [HEALTH_PATH, NODE_PATH]
        open_paths += [METRICS_PATH] if settings.metrics_without_key else []
        app.add_middleware(ApiKeyMiddleware, api_key=settings.api_key, open_paths=open_paths)
    if settings.cross_origin is not None:
        # CORS is handled before the API key is checked, because a browser's preflight request has
        # no key, and a web page must be able to read an answer 401.
        _allow_cross_origin(app, settings.cross_origin)
    if settings.allowed_hosts is not None:
        app.add_middleware(HostMiddleware, allowed=settings.allowed_hosts)
    return app


def _allow_cross_origin(app: FastAPI, allowed: CrossOrigin) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=allowed.origins,
        allow_methods=allowed.methods,
        allow_headers=allowed.headers,
        allow_credentials=allowed.credentials,
    )


class _Endpoint:
    """An ASGI handler of a route. A request of a `counted` handler is in flight until answered."""

    def __init__(self, front: Front, handler: Handler, counted: bool) -> None:
        self._front = front
        self._handler = handler
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._front.in_flight if self._counted else nullcontext():
            answer = await self._call_handler(Request(scope, receive, send))
            await answer(scope, receive, send)

    async def _call_handler(self, request: Request) -> ASGIApp:
        try:
            return await self._handler(self._front, request)
        except ClientGone:
            logger.debug("a client left before its answer was ready")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001 - every error becomes an HTTP answer
            return error_response(to_api_error(error))


def _route(
    path: str, methods: list[str], front: Front, handler: Handler, *, counted: bool = False
) -> Route:
    return Route(path, _Endpoint(front, handler, counted), methods=methods)


async def _answer_http_exception(
    routes: Sequence[Route], request: Request, error: Exception
) -> Response:
    """Answer an error of Starlette's router: the route, or the method of the route, is unknown."""
    answer = to_api_error(error)
    path, headers = request.url.path[:MAX_QUOTED_CHARACTERS], getattr(error, "headers", None) or {}
    if answer.status == 404:
        cure = _cure(path, [route.path for route in routes])
        answer = ApiError(f"there is no route {path}{cure}", status=404, code=answer.code)
    elif answer.status == 405:
        message = f"{path} does not take {request.method[:16]}; use {headers.get('Allow')}"
        answer = ApiError(message, status=405, code=answer.code)
    response = error_response(answer)
    response.headers.update(headers)
    return response


def _cure(path: str, known: Sequence[str]) -> str:
    """Return advice about a route that does not exist, as the end of an error message."""
    if path in DEV_ROUTES:
        return "; start the server with --enable-dev-routes"
    if path in LORA_ROUTES:
        return "; start the server with --lora-dir FOLDER"
    bare = path.rstrip("/")
    # A route below a route in NOT_BUILT is not built either.
    other = next((name for name in NOT_BUILT if f"{bare}/".startswith(f"{name}/")), None)
    if other is not None:
        return f": {NOT_BUILT[other]}; chats are at /v1/chat/completions"
    if bare in ("", "/v1"):
        return "; it is the base of /v1/chat/completions, /v1/completions and /v1/models"
    if bare in known:
        return f"; did you mean {bare}?"
    # Routes below another route are not suggested, because the upper route is at least as similar.
    bases = [each for each in known if not any(each.startswith(f"{base}/") for base in known)]
    return did_you_mean(path, bases) or "; the API lies under /v1"


async def _list_models(front: Front, request: Request, *, created: int) -> ASGIApp:
    adapters = [_adapter_card(front, each, created) for each in front.adapters.loaded]
    return _json(ModelList("list", [_card(front, created), *adapters]))


async def _one_model(front: Front, request: Request, *, created: int) -> ASGIApp:
    name = front.check_model(request.path_params["name"])
    for each in front.adapters.loaded:
        if each.name == name:
            return _json(_adapter_card(front, each, created))
    return _json(_card(front, created))


def _card(front: Front, created: int) -> ModelCard:
    name, root = front.model_name, next(iter(front.model_aliases), front.model_name)
    return ModelCard(name, "model", created, "stratakv", root, front.client.ready.max_model_len)


def _adapter_card(front: Front, adapter: LoadedAdapter, created: int) -> ModelCard:
    length, parent = front.client.ready.max_model_len, front.model_name
    return ModelCard(
        adapter.name, "model", created, "stratakv", adapter.path, length, parent,
        adapter.fingerprint,
    )  # fmt: skip


async def _health(front: Front, request: Request) -> ASGIApp:
    if not front.client.is_alive:
        raise EngineDead("its core is gone; restart the server")
    if front.client.num_failed_steps >= UNHEALTHY_FAILED_STEPS:
        message = (
            f"the engine's last {front.client.num_failed_steps} steps failed; the log says why, and"
            " a few more end it"
        )
        raise ApiError(message, status=503, kind=ENGINE, code="steps_fail")
    return _json({"status": "ok"})


async def _node(front: Front, request: Request) -> ASGIApp:
    """Answer with the values by which a router compares nodes. No API key is needed, so the values
    contain no secret and no address."""
    told = {
        "object": NODE_OBJECT,
        "model": front.model_name,
        **front.client.ready.identity,
        "generation_config": _generation_digest(front),
        "tokenizer": NONE if front.tokenizer is None else front.tokenizer.digest,
        "chat_template": NONE if front.template is None else front.template.digest,
        "tenant_header": front.settings.tenant_header or NONE,
    }
    return _json(told)


def _generation_digest(front: Front) -> str:
    """Return a digest of the sampling defaults and EOS tokens. Nodes with equal digests have the
    same defaults for requests that leave these settings out."""
    defaults = [sorted(front.default_sampling.items()), front.client.ready.eos_token_ids]
    return hashlib.sha256(msgspec.json.encode(defaults)).hexdigest()


async def _load(front: Front, request: Request) -> ASGIApp:
    return _json({"server_load": front.in_flight.count})


async def _version(front: Front, request: Request) -> ASGIApp:
    return _json({"version": __version__})


async def _server_info(front: Front, request: Request) -> ASGIApp:
    """Answer with the model's name, in the form that SGLang's router reads."""
    card = _card(front, 0)
    return _json(
        {
            "model_path": card.root,
            "served_model_name": card.id,
            "max_model_len": card.max_model_len,
            "version": __version__,
        }
    )


async def _metrics(front: Front, request: Request) -> ASGIApp:
    await front.metrics.core.refresh(front.client, front.settings.stats_timeout_seconds)
    front.metrics.show_tiers(front.client.ready.tiers)
    return Response(front.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def _reset_prefix_cache(front: Front, request: Request) -> ASGIApp:
    tiers = _only_parameter(request, "tiers", RESETS)
    try:
        await front.client.call("reset_prefix_cache", tiers)
    except ValueError as error:
        message = f"the engine did not reset its cache: {error}"
        raise ApiError(message, status=409, code="reset_refused") from None
    return _json({"reset": tiers})


async def _pause(front: Front, request: Request) -> ASGIApp:
    mode = _only_parameter(request, "mode", PAUSES)
    return _json(await front.client.call("pause", mode))


async def _call(name: str, front: Front, request: Request) -> ASGIApp:
    return _json(await front.client.call(name))


def _only_parameter(request: Request, param: str, choices: Sequence[str]) -> str:
    """Return the value of a route's only query parameter, by default `choices[0]`. Raises ApiError
    for another value or parameter."""
    unknown = sorted(set(request.query_params) - {param})
    if unknown:
        name = unknown[0][:MAX_QUOTED_CHARACTERS]
        message = f"unknown parameter `{name}`; the only one is `{param}`, {' or '.join(choices)}"
        raise ApiError(message, param=name, code="unknown_parameter")
    value = request.query_params.get(param, choices[0])
    if value not in choices:
        message = (
            f"`{param}` takes {' or '.join(choices)}, not {value[:64]!r}"
            f"{did_you_mean(value, choices)}"
        )
        raise ApiError(message, param=param, code="invalid_value")
    return value


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
