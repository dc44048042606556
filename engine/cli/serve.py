# SPDX-License-Identifier: Apache-2.0
"""`stratakv serve MODEL`: runs the HTTP server in this process, and the engine core in another one.

The port is bound before the model is loaded, so that a port in use is reported at once. After
SIGINT or SIGTERM the server accepts no new requests, lets running requests finish for a few
seconds, writes pending KV blocks to the tiers, and ends."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from ...tiers.remote.membership import is_address
from ...tiers.settings.sizes import rough_size, show_size
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import PEER, REMOTE
from .. import logs
from ..client.base import EngineDead
from ..config.engine_config import EngineConfig
from ..config.engine_options import model_aliases
from ..config.offload_config import OffloadConfig
from ..config.resolve import Settings
from ..config.server_options import ServerConfig, server_config
from ..sampling.processor_loading import ParamsCheck, make_params_check
from . import systemd
from .args import add_engine_arguments, add_server_arguments, engine_config_of, settings_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..api.api_settings import ApiSettings
    from ..client.process_client import ProcessClient
    from ..request.core_messages import Ready

DESCRIPTION = "Serve a model over HTTP, in the form of OpenAI's API."

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Seconds in which running requests may finish after SIGINT or SIGTERM.
_REQUEST_SECONDS = 5.0
# Seconds after _REQUEST_SECONDS for sending a last event to clients whose answers have not ended.
_LAST_WORDS_SECONDS = 3.0
# Seconds for the end of the engine core, in addition to the time in which the tiers write blocks.
_CLOSE_GRACE_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, and return 0. Raises EngineDead if the engine core has ended."""
    from ..core.setup.model_check import check_model

    config = engine_config_of(args)
    settings = settings_of(args)
    server = server_config(settings.server_options)
    sock = bind(server.host, server.port)
    logs.set_up(server.log_level, json=server.log_json)
    logger.info("options given: %s", settings.summary or "none")
    for note in (*settings.notes, *_notes(config, server, settings)):
        logger.info("%s", note)
    aliases = model_aliases(settings.model, settings.engine_options)
    with sock:
        check_model(config)
        from ..api.http.tls_context import make_tls_context

        tls = make_tls_context(server)
        check_params = make_params_check(config.logits_processors)
        return asyncio.run(_serve(config, server, sock, tls, aliases, check_params))


def _notes(config: EngineConfig, server: ServerConfig, settings: Settings) -> Iterator[str]:
    """Yield log lines about the default size of the ssd tier, and about settings without effect."""
    offload = config.offload
    if "ssd" in offload.tiers and "kv_offload_ssd_bytes" not in settings.given:
        yield (
            f"the ssd tier takes {rough_size(offload.ssd.capacity_bytes)} of the disk at once, in "
            f"{offload.ssd.path}, and keeps it after the end: --kv-offload-ssd-bytes sets how much,"
            " `stratakv cache rm` gives it back"
        )
    if server.metrics_without_key and server.api_key is None:
        yield "--metrics-without-key has no effect: no --api-key is asked for"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be bound."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host or repr(host)} is no address of this machine ({error}); use 127.0.0.1 "
            "or 0.0.0.0"
        ) from error
    sock = socket.socket(info[0], info[1], info[2])
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        # Listen before the model is loaded, or another process could listen on the port until then.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_explain_bind(error, host, port)) from error
    return sock


def _explain_bind(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; end what uses it or take another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be opened by this user; take one from 1024 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; use 127.0.0.1 or 0.0.0.0"
    return f"{host}:{port} cannot be opened ({error.strerror}); choose --host and --port anew"


def api_settings(
    server: ServerConfig, part_timeout_seconds: float = 60.0, lora_dir: Path | None = None
) -> ApiSettings:
    """Return the settings of the routes: the server's settings, the engine's time limit between two
    parts of a prompt, and the folder from which clients may load adapters."""
    from ..api.api_settings import ApiSettings, CrossOrigin
    from ..api.http.hosts import hosts_to_check

    allowed = CrossOrigin(
        server.allowed_origins,
        server.allowed_methods,
        server.allowed_headers,
        server.allow_credentials,
    )
    return ApiSettings(
        api_key=server.api_key,
        enable_dev_routes=server.enable_dev_routes,
        lora_dir=lora_dir,
        part_timeout_seconds=part_timeout_seconds,
        metrics_without_key=server.metrics_without_key,
        tenant_header=server.tenant_header,
        media_domains=server.media_domain,
        cross_origin=allowed if server.allowed_origins else None,
        allowed_hosts=hosts_to_check(
            server.allowed_hosts,
            server.host,
            asks_for_key=server.api_key is not None or server.ssl_cert_reqs == ssl.CERT_REQUIRED,
        ),
    )


async def _serve(
    config: EngineConfig,
    server: ServerConfig,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    model_aliases: Sequence[str],
    check_params: ParamsCheck,
) -> int:
    from ..api.chat_template import ChatTemplate
    from ..client.process_client import ProcessClient
    from ..models.checkpoint.generation_config import load_default_sampling
    from ..text.reasoning import find_marks
    from ..text.tokenizer import Tokenizer
    from ..text.tool_calls.tool_formats import find_tool_parser

    tokenizer = Tokenizer.load_if_present(config.model.path)
    if tokenizer is None:
        logger.warning(
            "%s has no tokenizer.json: the server takes and gives token ids alone, and no chats",
            config.model.path,
        )
    marks = find_marks(tokenizer, config.model.reasoning_start, config.model.reasoning_end)
    # All files that the server may refuse are read before the model is loaded.
    if server.tool_call_parser:
        find_tool_parser(server.tool_call_parser, None)
    template = None
    if server.chat_template is not None:
        if tokenizer is None:
            raise ConfigError(
                f"--chat-template makes prompts of texts, and {config.model.path} has no "
                "tokenizer.json to cut these into tokens; copy it from the model or drop the option"
            )
        template = ChatTemplate.read(server.chat_template, tokenizer)
    recommends = server.generation_config == "auto"
    default_sampling = load_default_sampling(config.model.path) if recommends else {}
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)

    starting = asyncio.ensure_future(
        ProcessClient.start(config, log_level=server.log_level, log_json=server.log_json)
    )
    if not await _unless(told, starting):
        return 0
    client = starting.result()
    try:
        from ..api.app import create_app

        app = create_app(
            client,
            model_name=config.model.served_name,
            model_path=config.model.path,
            model_aliases=model_aliases,
            tokenizer=tokenizer,
            settings=api_settings(server, config.session_idle_seconds, config.lora.folder),
            default_sampling=default_sampling,
            marks=marks,
            check_params=check_params,
            pooling=config.model.pooling,
            tool_call_parser=server.tool_call_parser,
            chat_template=template,
        )
        return await _serve_app(app, client, config, server, sock, tls, told)
    finally:
        await client.close(config.offload.shutdown_seconds + _CLOSE_GRACE_SECONDS)


async def _serve_app(
    app: FastAPI,
    client: ProcessClient,
    config: EngineConfig,
    server: ServerConfig,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    told: asyncio.Event,
) -> int:
    """Serve until `told` is set, and return 0. Raises EngineDead if the engine core has ended."""
    from ..api.http.http_server import make_server
    from ..api.metrics.stats_log import StatsLog

    http = make_server(
        app,
        log_level=server.log_level,
        shutdown_seconds=_REQUEST_SECONDS + _LAST_WORDS_SECONDS,
        tls=tls,
    )
    logs.adopt("uvicorn")
    running = asyncio.ensure_future(http.serve(sockets=[sock]))
    dead = asyncio.ensure_future(client.wait_dead())
    asking = asyncio.ensure_future(told.wait())
    figures = asyncio.ensure_future(StatsLog(client).run()) if server.log_stats else None
    try:
        _tell_start(config, server, client.ready, sock)
        systemd.tell_ready()
        await asyncio.wait((running, dead, asking), return_when=asyncio.FIRST_COMPLETED)
        systemd.tell_stopping()
        in_flight = app.state.in_flight
        logger.info(
            "shutting down; %d requests are being answered and have %g s to end",
            in_flight.count,
            _REQUEST_SECONDS,
        )
        http.should_exit = True
        asyncio.get_running_loop().call_later(_REQUEST_SECONDS, in_flight.abort_all)
        await running
    finally:
        for task in (asking, dead, figures):
            if task is not None:
                task.cancel()
        if app.state.pictures is not None:
            app.state.pictures.pool.close_pool()
    if dead.done() and not dead.cancelled():
        raise EngineDead(dead.result())
    return 0


def _tell_start(
    config: EngineConfig, server: ServerConfig, ready: Ready, sock: socket.socket
) -> None:
    """Log the settings of the started server, and print the ready line."""
    model, offload = config.model, config.offload
    logger.info("model %s, dtype %s", model.path, model.dtype)
    tokens = ready.num_blocks * ready.block_size
    logger.info("KV pool of %s tokens, for requests of up to %s", tokens, ready.max_model_len)
    if offload.enabled:
        sizes = {"cpu": offload.cpu.capacity_bytes, "ssd": offload.ssd.capacity_bytes}
        words = []
        for tier in offload.tiers:
            size = f" {show_size(sizes[tier])}" if tier in sizes else ""
            is_down = (REMOTE if is_address(tier) else tier) in ready.tiers_down
            words.append(f"{tier}{size}{' (down, used once it can be)' if is_down else ''}")
        words += [f"{PEER} {' '.join(offload.peers)}"] if offload.peers else []
        logger.info("tiers below the pool: %s", ", ".join(words))
    else:
        logger.info("no tiers below the pool; --kv-offload cpu,ssd adds them")
    host, port = sock.getsockname()[:2]
    asks_who = server.api_key is not None or server.ssl_cert_reqs == ssl.CERT_REQUIRED
    if not asks_who and not ip_address(host.partition("%")[0]).is_loopback:
        logger.warning(
            "any client that reaches %s may use this server; --api-key asks for a key", host
        )
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if server.ssl_certfile is None else "https"
    tiers = f"; {tiers_in_short(offload, ready.tiers_down)}" if offload.enabled else ""
    logs.announce(
        f"StrataKV serves {model.served_name} at {scheme}://{host}:{port} (context"
        f" {ready.max_model_len}, {ready.num_blocks} blocks of {ready.block_size} tokens{tiers});"
        " Ctrl-C ends it"
    )


def tiers_in_short(offload: OffloadConfig, down: Sequence[str] = ()) -> str:
    """Return a text with the sizes, paths and failures (`down`) of the tiers below the KV pool:
    `cpu: 4 GiB, ssd: ~/.cache/stratakv/ssd (20 GiB), remote: grpc://cache:9400 (down)`."""
    parts = {"cpu": f"cpu: {rough_size(offload.cpu.capacity_bytes)}"}
    if offload.ssd.path is not None:
        parts["ssd"] = (
            f"ssd: {_in_home(offload.ssd.path)} ({rough_size(offload.ssd.capacity_bytes)})"
        )
    parts |= {tier: tier for tier in offload.other_tiers}
    if offload.peers:
        parts[PEER] = f"{PEER}: {' '.join(offload.peers)}"
    if offload.cache_servers:
        parts[REMOTE] = f"{REMOTE}: {' '.join(map(str, offload.cache_servers))}"
    return ", ".join(f"{text} (down)" if tier in down else text for tier, text in parts.items())


def _in_home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):  # outside of the home directory, or no home directory
        return str(path)


async def _unless(told: asyncio.Event, starting: asyncio.Future[ProcessClient]) -> bool:
    """Wait for the engine core's start. If `told` is set first, cancel the start, return False."""
    asking = asyncio.ensure_future(told.wait())
    await asyncio.wait((starting, asking), return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if starting.done():
        return True
    starting.cancel()
    await asyncio.wait((starting,))
    return False
