# SPDX-License-Identifier: Apache-2.0
"""Server and client on two hosts, as far as the kernel is concerned: two network namespaces with a
cable between them, which is pulled and plugged in again. Needs the right to make them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from ..remote.test_faults import SECONDS, judge
from .bare_client import BareClient
from .rig import LAYOUT, WAIT_SECONDS, token_of

SERVER, CLIENT = "10.231.77.1", "10.231.77.2"
PULLS = (5, 100)  # in CI, and in a long run


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=WAIT_SECONDS
    )


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Names of the server's and of the client's, each with its end of the cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs the `ip` command, which is not here")
    names = (f"strata-s-{os.getpid()}", f"strata-c-{os.getpid()}")
    ends = (f"svs{os.getpid()}", f"svc{os.getpid()}")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", ends[0], "netns", names[0], "type", "veth",
                "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces may be made here: {error.stderr.strip()}")
        for name, end, address in zip(names, ends, (SERVER, CLIENT), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
        yield names


def _cable(namespaces: tuple[str, str], side: int, state: str) -> None:
    _ip("-n", namespaces[side], "link", "set", f"sv{'sc'[side]}{os.getpid()}", state)


@contextlib.contextmanager
def serving(namespace: str, *flags: str) -> Iterator[None]:
    command = [sys.executable, "-m", "stratakv.engine.cli.main", "cache-server", *flags]
    # One that is killed leaves the folder of its socket behind.
    with tempfile.TemporaryDirectory(prefix="stratakv-test-") as scratch:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command, "--host", SERVER],
            cwd="/",
            env={**os.environ, "TMPDIR": scratch},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
            assert process.poll() is None, f"the server has ended: {process.communicate()[0]}"
        finally:
            process.kill()
            process.communicate(timeout=WAIT_SECONDS)


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_a_cable_that_is_pulled(
    namespaces: tuple[str, str], kind: str, scale: str, rng: random.Random, tmp_path: Path
) -> None:
    flags = ["--cpu-bytes", str(64 * LAYOUT.slot_bytes)]
    credentials = {}
    if kind == "plain":
        flags.append("--insecure")
    else:
        authority = trustme.CA()
        cert = authority.issue_cert(SERVER)
        cert.private_key_pem.write_to_path(tmp_path / "key.pem")
        cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        token = tmp_path / "token"
        token.write_text(token_of("ann"))
        token.chmod(0o600)
        flags += ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
        flags += ["--token-file", str(token)]
        credentials = {"token_file": str(token), "ca_file": str(tmp_path / "ca.pem")}
    recoveries = []
    with (
        serving(namespaces[0], *flags),
        BareClient(
            9400,
            host=SERVER,
            tls=kind == "tls",
            credentials=credentials,
            prefix=("ip", "netns", "exec", namespaces[1]),
            **SECONDS,
        ) as client,
    ):
        client.wait_good(after=0.0)
        for _ in range(PULLS[scale == "long"]):
            side = rng.randrange(2)
            _cable(namespaces, side, "down")
            time.sleep(rng.uniform(0.0, 1.0))
            _cable(namespaces, side, "up")
            recoveries.append(client.wait_good(after=time.monotonic()))
    judge(client, recoveries)
