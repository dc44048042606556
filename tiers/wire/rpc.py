# SPDX-License-Identifier: Apache-2.0
"""The gRPC handlers and stubs of the cache service, made from its protobuf descriptor.

A servicer has one coroutine for each call, with a Python name (`OpenData` is `open_data`). A
coroutine takes a request (or an iterator of requests) and grpc's context, and returns the response
or writes several responses with `context.write`. A stub has one attribute for each call, with the
same name. On both sides `raw_messages.py` converts BlockPiece, and the generated code converts
every other message.

The server takes every request as a stream, even a request of a single message. Otherwise grpc would
wait for the message before the server could check credentials and deadlines, and a client without
credentials could keep calls open for ever.

A request that cannot be decoded raises WireError in the servicer that receives the request. Other
modules check credentials and do the work of the calls."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from ...proto.v1 import cache_service_pb2
from .frames import WireError
from .raw_messages import decode_piece, encode_piece

_SERVICE = cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"]
SERVICE_NAME: str = _SERVICE.full_name
_PIECE: str = cache_service_pb2.BlockPiece.DESCRIPTOR.full_name

# A function from a call's path and grpc's context to a context manager around the call.
Around = Callable[[str, Any], AbstractAsyncContextManager[None]]

# Channels ignore the proxies of the environment. A proxy would get the token of every call without
# TLS, and could not reach servers on this machine. The second option turns off
# GRPC_ADDRESS_HTTP_PROXY, which the first option does not cover.
_NO_PROXY = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.address_http_proxy_enabled_addresses", ""),
)


@dataclass(frozen=True, slots=True)
class Method:
    """The names, message classes and streaming kind of one call."""

    name: str  # the name in the proto file
    attribute: str  # the name in Python
    path: str
    request_class: type[Message]
    response_class: type[Message]
    client_streaming: bool
    server_streaming: bool

    @property
    def kind(self) -> str:
        """The streaming kind in the names of grpc's methods, such as `unary_stream`."""
        names = {True: "stream", False: "unary"}
        return f"{names[self.client_streaming]}_{names[self.server_streaming]}"


def _method(descriptor: Any) -> Method:
    name: str = descriptor.name
    return Method(
        name=name,
        attribute=re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(),
        path=f"/{SERVICE_NAME}/{name}",
        request_class=GetMessageClass(descriptor.input_type),
        response_class=GetMessageClass(descriptor.output_type),
        client_streaming=descriptor.client_streaming,
        server_streaming=descriptor.server_streaming,
    )


METHODS = tuple(_method(descriptor) for descriptor in _SERVICE.methods)


def make_channel(
    target: str, tls: Any = None, options: Sequence[tuple[str, int | str]] = ()
) -> Any:
    """Make a channel to `host:port` without proxy, which connects on its first call. All clients
    use this function. `tls` are grpc's channel credentials; new credential files need a new
    channel."""
    given = [*_NO_PROXY, *options]
    if tls is None:
        return grpc.insecure_channel(target, given)
    return grpc.secure_channel(target, tls, given)


class Stub:
    """A client with an attribute for each call: `stub.lookup(LookupRequest(...), timeout=0.05)`."""

    def __init__(self, channel: Any) -> None:
        for method in METHODS:
            make = getattr(channel, method.kind)
            call = make(
                method.path,
                request_serializer=_serializer(method.request_class),
                response_deserializer=_deserializer(method.response_class),
            )
            setattr(self, method.attribute, call)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def generic_handler(servicer: object, request_seconds: float) -> Any:
    """Make grpc's handler. A request of a single message must arrive within `request_seconds`."""
    handlers = {}
    for method in METHODS:
        behaviour = _checking(method, getattr(servicer, method.attribute), request_seconds)
        handlers[method.name] = stream_handler(
            behaviour,
            method.server_streaming,
            request_deserializer=_lenient(_deserializer(method.request_class)),
            response_serializer=_serializer(method.response_class),
        )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)


def stream_handler(behaviour: Any, server_streaming: bool, **codec: Any) -> Any:
    """Make a handler whose `behaviour` starts before any message has arrived."""
    if server_streaming:
        return grpc.stream_stream_rpc_method_handler(behaviour, **codec)
    return grpc.stream_unary_rpc_method_handler(behaviour, **codec)


async def only(requests: AsyncIterator[Any], seconds: float) -> Any:
    """Return a request's message. Raises TimeoutError after `seconds`, WireError without it."""
    async with asyncio.timeout(seconds):
        async for request in requests:
            return request
    raise WireError("the call came without its request")


def wrapped(handler: Any, path: str, around: Around) -> Any:
    """Make a handler that runs `handler` inside the context manager `around(path, context)`."""
    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    inner = getattr(handler, kind)

    async def behaviour(request: Any, context: Any) -> Any:
        async with around(path, context):
            if not inspect.isasyncgenfunction(inner):
                return await inner(request, context)
            # Responses of a generator are written here, so that `around` covers them.
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
            return None

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _checking(method: Method, behaviour: Any, request_seconds: float) -> Any:
    """Wrap `behaviour` so that the errors that `_lenient` returned are raised."""

    async def of_one(requests: Any, context: Any) -> Any:
        return await behaviour(_good(await only(requests, request_seconds)), context)

    async def of_stream(requests: Any, context: Any) -> Any:
        return await behaviour(_raising(requests), context)

    return of_stream if method.client_streaming else of_one


def _good(request: Any) -> Any:
    if isinstance(request, WireError):
        raise request
    return request


async def _raising(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _good(request)


def _serializer(message_class: type[Message]) -> Callable[[Any], bytes]:
    if message_class.DESCRIPTOR.full_name == _PIECE:
        return encode_piece
    serialize: Callable[[Any], bytes] = message_class.SerializeToString
    return serialize


def _deserializer(message_class: type[Message]) -> Callable[[bytes], Any]:
    if message_class.DESCRIPTOR.full_name == _PIECE:
        return decode_piece
    parse: Callable[[bytes], Any] = message_class.FromString
    return parse


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Make a deserializer that returns a WireError for invalid bytes. For a raised error, grpc
    would report an internal error, although the client caused the error."""

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except WireError as error:
            return error
        except DecodeError as error:
            return WireError(f"the request is no message of this call ({error})")

    return read
