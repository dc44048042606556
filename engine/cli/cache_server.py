# SPDX-License-Identifier: Apache-2.0
"""`stratakv cache-server`: stores KV blocks for the engines of a cluster, in its own process.

`config/cache_server_options.py` has the options. Without configured credentials, the server admits
only clients of its own user, who can read a token from a file that the server writes. On SIGHUP the
server reads tenants, tokens and certificates again, and keeps its blocks. On SIGTERM or SIGINT the
server reports NOT_SERVING, finishes running calls, writes blocks to disk, and ends; a second signal
ends the server at once. The server needs only the base installation, without torch and engine."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...tiers.errors import TierConfigError
from ...tiers.settings import readers
from ...tiers.settings.format import one_line
from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import ConfigError
from .. import logs
from ..config.cache_server_options import OPTIONS, read_options, server_settings
from ..config.resolve import CACHE_SERVER_PREFIX
from . import systemd
from .args import add_options

if TYPE_CHECKING:
    from ...tiers.cache_server.server import CacheServer, ServerSettings

DESCRIPTION = "Keep blocks for many engines; they use it with --kv-offload ...,grpc://host:port."

logger = logging.getLogger(__name__)

_EXIT_NOT_WRITTEN = 1
_PR_SET_DUMPABLE = 4

# glibc's M_MMAP_THRESHOLD (32 MiB is the most that glibc takes), M_TRIM_THRESHOLD, M_TOP_PAD.
_MALLOC = ((-3, 32 * 1024**2), (-1, 64 * 1024**2), (-2, 8 * 1024**2))
_SWITCH_SECONDS = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE",
        help=f"YAML or TOML file of these options; flags and {CACHE_SERVER_PREFIX}* come before it",
    )  # fmt: skip
    parser.add_argument(
        "--new-token", metavar="NAME", help="make a token for a tenant, print it and end"
    )
    add_options(parser, OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Return 0, or 1 if some blocks could not be written to disk."""
    # A handler records a SIGHUP during the start, which would end the process otherwise.
    asked_early: list[int] = []
    try:
        if args.new_token is not None:
            return _print_new_token(args.new_token)
        signal.signal(signal.SIGHUP, lambda number, _frame: asked_early.append(number))
        options = read_options(vars(args), os.environ)
        settings = server_settings(options)
        logs.set_up(options.log_level, json=options.log_json)
        _prepare_process()

        def read_again() -> ServerSettings:
            return server_settings(read_options(vars(args), os.environ), settings)

        return asyncio.run(_serve(settings, read_again, asked_early))
    except TierConfigError as error:
        raise ConfigError(str(error)) from error


def _print_new_token(name: str) -> int:
    from ...tiers.cache_server.access.tenants import new_token, token_digest

    readers.text("--new-token", name)
    token = new_token()
    print(f"token: {token}\n")
    print(
        "Give it to the client in a file (--token-file or token_file=), and this to the server:\n"
    )
    print("[[tenant]]")
    print(f'name = "{name}"')
    print(f'token_sha256 = "{token_digest(token).hex()}"')
    print('cpu_bytes = "1GiB"')
    return 0


def _prepare_process() -> None:
    """Make new files private, raise the limit of open files, and forbid core dumps."""
    os.umask(0o077)
    # Other processes of this user may be tenants, which must not read this process's memory.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        logger.warning(
            "other processes of this user can read this one: %s", os.strerror(ctypes.get_errno())
        )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Each event needs grpc's own thread, which at Python's default switch interval may wait 5 ms
    # until the event loop's thread releases the GIL.
    sys.setswitchinterval(_SWITCH_SECONDS)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Make glibc keep the memory that grpc frees, about a MiB for each message, instead of
    returning it to the kernel. With fewer page faults, streams are about 1.5 times as fast."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has the function mallopt
        for parameter, value in _MALLOC:
            mallopt(parameter, value)


async def _serve(
    settings: ServerSettings, read_again: Callable[[], ServerSettings], asked_early: Sequence[int]
) -> int:
    """Serve until a signal, and return the exit code. `asked_early` has one entry for each SIGHUP
    before the start of the event loop."""
    from ...tiers.cache_server.server import CacheServer

    told = asyncio.Event()
    hung_up: asyncio.Queue[float] = asyncio.Queue()  # the times at which SIGHUP was received
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: hung_up.put_nowait(loop.time()))
    if asked_early:
        hung_up.put_nowait(loop.time())
    server = CacheServer(settings)
    await server.start()
    gc.collect()
    gc.freeze()  # the objects of the start live until the end, so need no garbage collection
    logs.announce(_announcement(server))
    systemd.tell_ready()
    reloading = asyncio.create_task(_reload(server, hung_up, read_again))
    await told.wait()
    systemd.tell_stopping()
    reloading.cancel()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a SIGHUP must not stop the shutdown
    logger.info("ending within about %g s", settings.drain_seconds)
    return 0 if await server.drain() else _EXIT_NOT_WRITTEN


async def _reload(
    server: CacheServer, hung_up: asyncio.Queue[float], read_again: Callable[[], ServerSettings]
) -> None:
    """Reload the settings after each SIGHUP. All signals during a reload cause one more reload."""
    while True:
        heard = await hung_up.get()
        while not hung_up.empty():
            hung_up.get_nowait()
        systemd.tell_reloading()
        try:
            left = await server.reload(read_again)
        except (ConfigError, TierConfigError) as error:
            logger.error("SIGHUP: %s; everything stays as it was", one_line(str(error)))
        except Exception:  # the task must not end, because it waits for the next signal
            logger.exception("SIGHUP: tenants and certificates could not be read anew")
        else:
            seconds = asyncio.get_running_loop().time() - heard
            names = ", ".join(tenant.name for tenant in server.settings.tenants)
            logger.info(
                "SIGHUP: tenants and certificates were read anew in %.3f s; tenants %s",
                seconds,
                names,
            )
            for sentence in left:
                logger.warning("SIGHUP: %s", sentence)
        systemd.tell_ready()


def _announcement(server: CacheServer) -> str:
    settings = server.settings
    tenants = ", ".join(
        f"{each.name} (cpu {show_size(each.cpu_bytes)}, ssd "
        f"{show_size(each.ssd_bytes) if each.ssd_bytes else 'none'})"
        for each in settings.tenants
    )
    security = "TLS" if settings.tls is not None else "no TLS"
    access = ""
    if server.token_path is not None:
        access = f", for clients of this user by the token in {server.token_path}"
    elif any(each.takes_anyone for each in settings.tenants):
        access = ", for any client that reaches it"
    data = f"data port {server.data_plane.port}" if server.data_plane.port else "no data port"
    metrics = (
        f"metrics at http://{settings.metrics_host}:{server.metrics_port}/metrics"
        if server.metrics_port
        else "no metrics"
    )
    return (
        f"StrataKV cache server at {server.address} ({security}){access}, {data}; "
        f"tenants {tenants}; {metrics}"
    )
