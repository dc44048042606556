# SPDX-License-Identifier: Apache-2.0
"""`CacheClient`: calls a cache server for the commands `ping` and `describe`.

This module needs only the base installation, and imports neither torch nor the engine."""

from __future__ import annotations

import argparse
import socket
import ssl
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ....tiers.errors import TierConfigError
from ....tiers.settings import readers
from ....tiers.settings.format import one_line
from ....tiers.settings.values import ConfigError

if TYPE_CHECKING:
    from ....tiers.remote.credentials import Credentials
    from ....tiers.remote.membership import ServerAddress

CALL_SECONDS = 5.0
EXIT_NO_ANSWER = 1
_FILES = {
    "token_file": "the token to show",
    "ca_file": "who signs the server's certificate (default: the system's authorities)",
    "cert_file": "a client certificate",
    "key_file": "its key",
}


class NoAnswer(Exception):
    """The cache server cannot be reached, or has refused a call. The user sees the error's text.
    `is_down` is True if the server may be reachable later."""

    def __init__(self, text: str, *, is_down: bool = False) -> None:
        super().__init__(text)
        self.is_down = is_down


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", help="such as grpc://host:9400, or grpcs://")
    for name, text in _FILES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, metavar="FILE", help=f"file of {text}"
        )
    parser.add_argument(
        "--server-name", metavar="NAME",
        help="what the server's certificate says (default: the host)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")


def client_of(args: argparse.Namespace) -> CacheClient:
    """Return a client for the arguments of `add_client_arguments`. Raises ConfigError."""
    try:
        return CacheClient(_address(args), _credentials(args))
    except TierConfigError as error:
        raise ConfigError(str(error)) from error


class CacheClient:
    """A client of one cache server, and a context manager. `flag`: the prefix of credentials' flags
    in errors. Raises ConfigError for invalid credentials; every call may raise NoAnswer."""

    def __init__(
        self, address: ServerAddress, credentials: Credentials, *, flag: str = "--"
    ) -> None:
        self.address, self.credentials, self._flag = address, credentials, flag
        try:
            credentials.check_files()
            self._metadata = self.credentials.metadata(self.address)
            self._channel, self._stub, self._health = _open(self.address, self.credentials)
        except TierConfigError as error:
            raise ConfigError(str(error)) from error

    def __enter__(self) -> CacheClient:
        try:
            _check_reachable(self.address, self.credentials, self._flag)
        except BaseException:
            self._channel.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call_method(self, name: str, request: Any) -> Any:
        return self._call_rpc(getattr(self._stub, name), request)

    def health(self) -> str:
        """Return the server's health status, such as SERVING. Raises NoAnswer."""
        from grpc_health.v1 import health_pb2

        response = self._call_rpc(self._health, health_pb2.HealthCheckRequest())
        status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return status

    def _call_rpc(self, method: Any, request: Any) -> Any:
        import grpc

        from ....tiers.wire.status import REFUSALS, verdict_of

        try:
            return method(request, timeout=CALL_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            reason = verdict_of(error).reason
            said = one_line(error.details() or error.code().name)
            if reason == "unauthenticated" and self.credentials.token_file is None:
                said += f"{self.credentials.missing(self.address)}; name a token with "
                said += f"{self._flag}token-file"
            raise NoAnswer(
                f"{self.address}: {reason}: {said}", is_down=reason not in REFUSALS
            ) from error


def _address(args: argparse.Namespace) -> ServerAddress:
    from ....tiers.remote.membership import parse_address

    return parse_address(readers.text("ADDRESS", args.address))


def _credentials(args: argparse.Namespace) -> Credentials:
    from ....tiers.remote.credentials import Credentials

    given: dict[str, Any] = {}
    for name in _FILES:
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        given[name] = None if value is None else readers.path(flag, value)
    if args.server_name is not None:
        given["server_name"] = readers.text("--server-name", args.server_name)
    return Credentials(**given)


def _open(address: ServerAddress, credentials: Credentials) -> tuple[Any, Any, Any]:
    """Return a new channel, the stub of the cache service, and the health call."""
    from grpc_health.v1 import health_pb2

    from ....tiers.remote.server_link import open_channel
    from ....tiers.wire.rpc import Stub

    channel = open_channel(address, credentials)
    health = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return channel, Stub(channel), health


def _check_reachable(address: ServerAddress, credentials: Credentials, flag: str) -> None:
    """Connect once without grpc, to get a clear reason for a failure. Raises NoAnswer."""
    context = credentials.context() if address.tls else _trusting()
    context.set_alpn_protocols(["h2"])
    name = credentials.server_name or address.host
    try:
        sock = socket.create_connection((address.host, address.port), CALL_SECONDS)
    except OSError as error:
        raise NoAnswer(
            f"{address}: no server can be reached ({error.strerror or error})", is_down=True
        ) from None
    with sock:
        try:
            with context.wrap_socket(sock, server_hostname=name) as secured:
                # With TLS 1.3 a server checks the client's certificate after the handshake. A grpc
                # server that accepts the certificate sends data before the client does.
                if address.tls and not _speaks(secured):
                    raise NoAnswer(_unwelcome(address, credentials, flag))
        except ssl.SSLCertVerificationError as error:
            raise NoAnswer(
                f"{address}: its certificate is not trusted ({error.verify_message}); name its "
                f"authority with {flag}ca-file, or what it says with {flag}server-name"
            ) from None
        except OSError as error:
            if address.tls:
                raise NoAnswer(
                    f"{address}: it does not speak TLS ({error.strerror or error}); try "
                    f"grpc://{address.target}"
                ) from None
            return
    if not address.tls:
        raise NoAnswer(f"{address}: it speaks TLS; try grpcs://{address.target}")


def _speaks(sock: ssl.SSLSocket) -> bool:
    """Return whether the server accepts the client: True if the server sends a byte or is slow,
    False if the server closes the connection or sends a TLS alert."""
    try:
        return bool(sock.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def _unwelcome(address: ServerAddress, credentials: Credentials, flag: str) -> str:
    what = (
        f"it asks for a client certificate, it seems; name one with {flag}cert-file and "
        f"{flag}key-file"
        if credentials.cert_file is None
        else f"it does not trust the certificate in {credentials.cert_file}, it seems; name one "
        "that its --tls-client-ca has signed"
    )
    return f"{address}: it ended the connection after the handshake; {what}"


def _trusting() -> ssl.SSLContext:
    """Return a TLS context that trusts any certificate. The context is used only to find out
    whether a server uses TLS, and not to send data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
