# SPDX-License-Identifier: Apache-2.0
"""The options of `stratakv cache-server`, and the `ServerSettings` made from the options.

Flags override environment variables, which override the file that `--config` names. The environment
variable STRATAKV_CACHE_SERVER_PORT=9400 has the effect of `--port 9400`."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tiers.codecs.known_codecs import CODECS, NONE
from ...tiers.settings import readers
from ...tiers.settings.file import called, read_file, read_ordinary
from ...tiers.settings.option import Option, flag_of, options_of, setting
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import GIB, MIB, ConfigError
from ...tiers.tier_settings import SERVER_SSD, CpuSettings, SsdSettings
from ..logs import LOG_LEVELS
from .option_readers import MAX_PORT, seconds_from_zero
from .resolve import CACHE_SERVER_PREFIX, MAX_NAME_CHARACTERS, is_service_link

if TYPE_CHECKING:
    from ...tiers.cache_server.access.tenants import Tenants
    from ...tiers.cache_server.server import ServerSettings
    from ...tiers.wire.limits import Limits

DEFAULT_SECRET_NAME = "server.secret"  # noqa: S105 - the name of a file
# Options whose values become fields of ServerSettings unchanged.
_SAME = (
    "host", "port", "metrics_host", "metrics_port", "metrics_exposed", "insecure", "reflection",
    "drain_seconds",
)  # fmt: skip
_MOST_TEXT_BYTES = 16 * 1024**2  # size limit of the files of --tenants and --token-file

_CPU = options_of(CpuSettings, "")
_SSD = options_of(SsdSettings, "")
_CODECS = (NONE, *CODECS)  # the codecs of a cache server; engines may have more

_port = readers.integer_within(0, MAX_PORT)
_count = readers.integer_within(1, 1_000_000)


def _as_engines(option: Option, default: str, **changed: Any) -> Any:
    """Return a dataclass field with a copy of an engine's tier option and `changed` fields."""
    return field(default=default, metadata={Option: replace(option, field="", **changed)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheServerOptions:
    """The values of all options of the cache server, each with its default."""

    cpu_bytes: int = setting(GIB, readers.size, "memory for blocks, of all tenants", "SIZE")
    ssd_path: Path | None = setting(
        None, readers.path, "directory for blocks on a disk, or several by commas", "PATH"
    )
    ssd_bytes: int | None = setting(None, readers.size, "most bytes there, of all tenants", "SIZE")
    ssd_mac_key_file: Path | None = setting(
        None, readers.path, "file with the key that seals blocks on a disk that others can write",
        "FILE",
    )  # fmt: skip
    cpu_policy: str = _as_engines(_CPU["policy"], CpuSettings().policy)
    ssd_policy: str = _as_engines(_SSD["policy"], SERVER_SSD.policy)
    ssd_admission: str = _as_engines(_SSD["admission"], SERVER_SSD.admission)
    ssd_codec: str = _as_engines(
        _SSD["codec"], SERVER_SSD.codec, read=readers.one_of(*_CODECS),
        help=f"how blocks are packed on their way to the disk: {', '.join(_CODECS)}",
    )  # fmt: skip
    require_tiers: bool = setting(
        False, readers.switch,
        "refuse to start while a disk of --ssd-path cannot be used, instead of going on without",
    )  # fmt: skip
    host: str = setting("127.0.0.1", readers.text, "address to listen on", "ADDRESS")
    port: int = setting(9400, _port, "port of the calls; 0 takes a free one", "N")
    data_port: int | None = setting(
        None, _port, "port of the data connection; 0 takes a free one", "N",
        "the one after --port",
    )  # fmt: skip
    data_connections: bool = setting(True, readers.switch, "move blocks without gRPC too")
    shared_memory: bool | None = setting(
        None, readers.switch, "let clients of this user on this machine map their tenant's memory",
        unset="on; off with --tenants, for who runs as this user could read every tenant's",
    )  # fmt: skip
    tenants: Path | None = setting(None, readers.path, "TOML file of tenants", "FILE")
    token_file: Path | None = setting(
        None, readers.path, "file of the token that clients send", "FILE",
        "on loopback one that clients of this user find by themselves",
    )  # fmt: skip
    secret_file: Path | None = setting(
        None, readers.path, "file of the server's secret", "FILE",
        f"{DEFAULT_SECRET_NAME} in --ssd-path; without one a new secret each time",
    )  # fmt: skip
    tls_cert: Path | None = setting(
        None, readers.path, "PEM file of the server's certificate", "FILE"
    )
    tls_key: Path | None = setting(None, readers.path, "PEM file of its key", "FILE")
    tls_client_ca: Path | None = setting(
        None, readers.path, "ask clients for certificates of this CA", "FILE"
    )
    insecure: bool = setting(
        False, readers.switch,
        "admit any client that reaches it: no token of its own, and any address without TLS",
    )  # fmt: skip
    metrics_host: str = setting("127.0.0.1", readers.text, "address of /metrics", "ADDRESS")
    metrics_port: int | None = setting(None, _port, "port of /metrics; 0 takes a free one", "N")
    metrics_exposed: bool = setting(
        False, readers.switch,
        "let other machines reach /metrics, which has no TLS and no credentials",
    )  # fmt: skip
    reflection: bool = setting(False, readers.switch, "let clients ask for the protocol")
    drain_seconds: float = setting(
        30.0, seconds_from_zero, "for ending in an orderly way", "SECONDS"
    )
    max_calls: int = setting(512, _count, "calls at once", "N")
    max_data_connections: int = setting(256, _count, "data connections at once", "N")
    max_bytes_in_flight: int = setting(256 * MIB, readers.size, "blocks in gRPC streams", "SIZE")
    call_seconds: float = setting(30.0, seconds_from_zero, "longest time of one call", "SECONDS")
    log_level: str = setting("info", readers.one_of(*LOG_LEVELS), ", ".join(LOG_LEVELS), "LEVEL")
    log_json: bool = setting(False, readers.switch, "one JSON object for each log line")


OPTIONS: Mapping[str, Option] = options_of(CacheServerOptions, "")


def read_options(flags: Mapping[str, Any], environ: Mapping[str, str]) -> CacheServerOptions:
    """Return all options. A value comes from `flags`, else the environment, else the config file,
    else the default. `flags`: the given flags by name, with `config`. Raises ConfigError."""
    given: dict[str, tuple[str, Any]] = {}
    variables = _variables(environ)
    config = variables.pop("config", None)
    if flags.get("config") is not None:
        config = "--config", flags["config"]
    if config is not None:
        path = readers.path(*config)
        for name, value in read_file(path).items():
            if name not in OPTIONS:
                raise ConfigError(f"{called(path, name)} is no option{did_you_mean(name, OPTIONS)}")
            given[name] = called(path, name), value
    given |= {name: each for name, each in variables.items() if name in OPTIONS}
    given |= {name: (flag_of(name), flags[name]) for name in OPTIONS if name in flags}
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if name in given:
            origin, value = given[name]
            values[name] = None if value is None else option.read(origin, value)
    return CacheServerOptions(**values)


def _variables(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the variable and value of each option (and `config`) that the environment sets. Raises
    ConfigError for an unknown variable with the prefix STRATAKV_CACHE_SERVER_."""
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(CACHE_SERVER_PREFIX) or is_service_link(variable, value):
            continue
        name = variable.removeprefix(CACHE_SERVER_PREFIX).lower()
        if (name not in OPTIONS and name != "config") or variable != variable.upper():
            near = did_you_mean(name, [*OPTIONS, "config"])
            raise ConfigError(
                f"{variable[:MAX_NAME_CHARACTERS]} is set and names no option of the cache server"
                f"{near or '; `stratakv cache-server --help` lists them'}"
            )
        found[name] = variable, value
    return found


def server_settings(
    options: CacheServerOptions, running: ServerSettings | None = None
) -> ServerSettings:
    """Return the server's settings. `running`: the settings of a running server, whose secret, MAC
    key and own token are kept, because the files of secret, key and token may be gone. Raises
    ConfigError or TierConfigError."""
    from ...tiers.cache_server.secret_file import read_secret
    from ...tiers.cache_server.server import ServerSettings

    ssd_path = options.ssd_path
    if (ssd_path is None) != (options.ssd_bytes is None):
        raise ConfigError("--ssd-path and --ssd-bytes go together; give both or neither")
    disks = SsdSettings(path=ssd_path).paths
    if options.require_tiers and not disks:
        raise ConfigError("--require-tiers is for blocks on a disk; give --ssd-path too")
    secret_file = options.secret_file
    if secret_file is None and disks:
        secret_file = disks[0] / DEFAULT_SECRET_NAME
    tenants, own_token = _tenants(options, None if running is None else running.own_token)
    if running is not None:
        secret, mac_key = running.secret, running.mac_key
    else:
        secret = os.urandom(32) if secret_file is None else read_secret(secret_file)
        mac_key = _mac_key(options)
    shares_memory = options.shared_memory
    same: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
    return ServerSettings(
        tenants=tenants,
        own_token=own_token,
        secret=secret,
        data_port=_data_port(options),
        shares_memory=options.tenants is None if shares_memory is None else shares_memory,
        ssd_path=ssd_path,
        mac_key=mac_key,
        require=options.require_tiers,
        cpu=CpuSettings(policy=options.cpu_policy),
        ssd=_ssd_settings(options),
        tls=_tls(options),
        limits=_limits(options),
        **same,
    )


def _ssd_settings(options: CacheServerOptions) -> SsdSettings:
    """Return the SSD settings of every tenant's store. Raises an error for unusable settings."""
    from ...tiers.admission import make_filter
    from ...tiers.block import BlockLayout
    from ...tiers.codecs.known_codecs import make_codec
    from ...tiers.policies.known_policies import policy_factory

    names = ("ssd_policy", "ssd_admission", "ssd_codec")
    for name in names:
        if options.ssd_path is None and getattr(options, name) != OPTIONS[name].default:
            raise ConfigError(f"{flag_of(name)} is for blocks on a disk; give --ssd-path too")
    for policy in (options.cpu_policy, options.ssd_policy):
        policy_factory(policy)
    make_filter(options.ssd_admission, 1)
    make_codec(options.ssd_codec, BlockLayout(1, 16, 1, 64, "bfloat16"))
    return replace(
        SERVER_SSD, **{name.removeprefix("ssd_"): getattr(options, name) for name in names}
    )


def _mac_key(options: CacheServerOptions) -> Any:
    from ...tiers.mac_key import read_mac_key

    path, disks = options.ssd_mac_key_file, SsdSettings(path=options.ssd_path).paths
    if path is None:
        return None
    if not disks:
        raise ConfigError("--ssd-mac-key-file is for blocks on a disk; give --ssd-path too")
    keys = [read_mac_key(path, flag_of("ssd_mac_key_file"), disk) for disk in disks]
    return keys[0]  # all keys are equal; read_mac_key checks the key file against each disk


def _limits(options: CacheServerOptions) -> Limits:
    from ...tiers.wire.limits import Limits

    names = ("max_calls", "max_data_connections", "max_bytes_in_flight", "call_seconds")
    return Limits(**{name: getattr(options, name) for name in names})


def _data_port(options: CacheServerOptions) -> int | None:
    if not options.data_connections:
        return None
    if options.data_port is not None:
        return options.data_port
    return options.port + 1 if 0 < options.port < MAX_PORT else 0


def _tls(options: CacheServerOptions) -> Any:
    from ...tiers.cache_server.access.tls import TlsFiles

    cert, key, client_ca = options.tls_cert, options.tls_key, options.tls_client_ca
    if (cert is None) != (key is None) or (client_ca is not None and cert is None):
        raise ConfigError("--tls-cert and --tls-key go together, --tls-client-ca with both")
    return None if cert is None or key is None else TlsFiles(cert, key, client_ca)


def _tenants(options: CacheServerOptions, left_token: str | None) -> tuple[Tenants, str | None]:
    """Return all tenants, and the server's own token for clients of this user, or None. A running
    server's own token, `left_token`, becomes the own token again."""
    from ...tiers.cache_server.access.tenants import (
        check_totals,
        new_token,
        only_tenant,
        read_tenants,
    )
    from ...tiers.wire.listen import is_loopback

    path, token_file = options.tenants, options.token_file
    cpu_bytes, ssd_bytes = options.cpu_bytes, options.ssd_bytes or 0
    if path is None:
        token = None if token_file is None else _token_of(token_file)
        has_client_ca = options.tls_client_ca is not None
        is_open = token is None and not has_client_ca and not options.insecure
        own_token = None
        if is_open and is_loopback(options.host):
            own_token = left_token or new_token()
        tenant = only_tenant(
            cpu_bytes,
            ssd_bytes,
            own_token if token is None else token,
            has_client_ca=has_client_ca,
        )
        return tenant, own_token
    if token_file is not None:
        raise ConfigError("--token-file is for a server without --tenants; give one of the two")
    text = _text_of(path, "--tenants")
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):  # a user who may write the file could add tenants
        raise ConfigError(
            f"--tenants names {path}, which other users can write (mode {stat.S_IMODE(mode):04o}); "
            f"run: chmod go-w {path}"
        )
    tenants = read_tenants(text, f"the tenants file {path}", readers.size)
    check_totals(tenants, cpu_bytes, ssd_bytes)
    if ssd_bytes and not any(tenant.ssd_bytes for tenant in tenants):
        raise ConfigError(
            f"--ssd-path would not be used, for no tenant in {path} has ssd_bytes; give them some, "
            "or leave --ssd-path and --ssd-bytes out"
        )
    return tenants, None


def _token_of(path: Path) -> str:
    token = _text_of(path, "--token-file").strip()
    if not token:  # an empty token would admit every client
        raise ConfigError(
            f"--token-file names {path}, which is empty; write a token there, which "
            "`stratakv cache-server --new-token NAME` makes"
        )
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigError(
            f"--token-file names {path}, which other users can read or write (mode "
            f"{stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
        )
    return token


def _text_of(path: Path, flag: str) -> str:
    try:
        # utf-8-sig: an editor may have written a byte-order mark.
        return read_ordinary(path, _MOST_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} names {path}, which cannot be read as text ({error})") from error
