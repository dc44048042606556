# SPDX-License-Identifier: Apache-2.0
"""Tenants files, how callers are recognised, tickets and the server's secret."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.cache_server.access.auth import Authenticator, Caller
from stratakv.tiers.cache_server.access.tenants import (
    Quota,
    Tenant,
    Tenants,
    check_totals,
    new_token,
    only_tenant,
    read_tenants,
    token_digest,
)
from stratakv.tiers.cache_server.access.tickets import Tickets
from stratakv.tiers.cache_server.secret_file import read_secret
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.settings import readers
from stratakv.tiers.wire.status import TooMuch, Unauthenticated

from ...open_files import open_paths

TOKENS = {name: f"{name}-{'t' * 16}" for name in ("ann", "bob", "cyd")}
DIGEST = {name: token_digest(token).hex() for name, token in TOKENS.items()}
FILE = f"""
[[tenant]]
name = "ann"
token_sha256 = ["{DIGEST["ann"]}", "{"0" * 64}"]
cpu_bytes = "1MiB"
ssd_bytes = 4096

[[tenant]]
name = "bob"
token_sha256 = "{DIGEST["bob"].upper()}"
certificate_names = ["bob.example", "Robert"]
cpu_bytes = 1000
pool = "both"

[[tenant]]
name = "cyd"
certificate_names = "cyd.example"
cpu_bytes = 500
ssd_bytes = "1KiB"
pool = "both"
"""


def _read(text: str) -> Tenants:
    return read_tenants(text, "tenants.toml", readers.size)


def test_a_file_of_tenants() -> None:
    tenants = _read(FILE)
    assert [tenant.name for tenant in tenants] == ["ann", "bob", "cyd"]
    assert tenants.quotas == {"tenant:ann": Quota(2**20, 4096), "pool:both": Quota(1500, 1024)}
    for name in ("ann", "bob"):
        assert tenants.by_token(TOKENS[name].encode()) is tenants.by_name(name)
    assert tenants.by_token(TOKENS["cyd"].encode()) is None
    assert tenants.by_token(b"") is None
    assert tenants.by_certificate(["BOB.example", "unknown"]) is tenants.by_name("bob")
    assert tenants.by_certificate(["bob.example", "cyd.example"]) is None, "two tenants' names"
    assert tenants.by_certificate(["unknown"]) is None
    assert tenants.anyone is None


def _with(field: str, value: str) -> str:
    fields = {"name": '"ann"', "cpu_bytes": "1000", "token_sha256": f'"{DIGEST["ann"]}"'}
    lines = [f"{name} = {text}" for name, text in (fields | {field: value}).items() if text]
    return "\n".join(["[[tenant]]", *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[tenant]\n", r"tenants.toml is no TOML: .*line 1"),
        ("x = 1\n", "one .*tenant.* or more and nothing else; it has x"),
        ("", "it has nothing else"),
        ("tenant = 3\n", "one .*tenant.* or more"),
        ("tenant = [3]\n", r"\[\[tenant\]\] 1: expected a table"),
        (_with("nam", "1"), "unknown field nam; the fields are name, token_sha256"),
        (_with("name", ""), r"\[\[tenant\]\] 1, name: expected up to 64 letters"),
        (_with("name", '"../x"'), "expected up to 64 letters"),
        (_with("name", '"' + "n" * 65 + '"'), "expected up to 64 letters"),
        (_with("cpu_bytes", ""), r"1 \(ann\): cpu_bytes is missing"),
        (_with("cpu_bytes", "0"), "cpu_bytes is a size above 0, not 0"),
        (_with("ssd_bytes", "-1"), "ssd_bytes is a size, not -1"),
        (_with("token_sha256", ""), "nothing says who it is"),
        (_with("token_sha256", '"abc"'), "expected the SHA-256 .* got 3 characters"),
        (_with("token_sha256", "[1]"), "expected a text or a list of texts"),
        (_with("certificate_names", '[""]'), "expected a text or a list of texts"),
        (_with("pool", '"a b"'), r"1 \(ann\), pool: expected up to 64 letters"),
        (_with("x", "1") * 2, "cannot|no TOML|unknown"),
        (_with("pool", '"a"') + "\n" + _with("pool", '"b"'), "have the same name"),
        (
            _with("pool", '"a"') + "\n" + _with("name", '"bob"'),
            "ann and bob have the same token",
        ),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_right(text: str, message: str) -> None:
    with pytest.raises(TierConfigError, match=message):
        _read(text)


def test_a_size_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"tenants.toml, \[\[tenant\]\] 1 \(ann\), cpu_bytes"):
        _read(_with("cpu_bytes", '"much"'))


def test_a_token_is_in_no_message() -> None:
    token = "secret token of nobody"
    with pytest.raises(TierConfigError) as raised:
        token_digest(token)
    assert token not in str(raised.value)
    with pytest.raises(TierConfigError, match="has 5 characters"):
        token_digest("short")
    assert token_digest(new_token()) != token_digest(new_token())


def test_quotas_beyond_the_totals_are_refused() -> None:
    tenants = _read(FILE)
    check_totals(tenants, 2**20 + 1500, 4096 + 1024)
    with pytest.raises(TierConfigError, match=r"cpu_bytes are 1050076 together .* has 1050075"):
        check_totals(tenants, 2**20 + 1499, 2**30)
    with pytest.raises(TierConfigError, match="raise --ssd-bytes"):
        check_totals(tenants, 2**30, 5119)


def test_rooms_of_pools_and_tenants_have_different_names() -> None:
    alone, shared = Tenant("x", 1), Tenant("y", 1, pool="x")
    assert alone.tenant_store != shared.tenant_store


def _metadata(*values: str) -> list[tuple[str, str]]:
    return [("authorization", value) for value in values]


def _peer(*names: str) -> dict[str, list[bytes]]:
    return {"x509_subject_alternative_name": [name.encode() for name in names]}


def _who(tenants: Tenants, metadata: list[tuple[str, str]], peer: Any = None) -> str:
    return Authenticator(tenants).caller_of(metadata, peer or {}).tenant.name


def test_who_calls() -> None:
    tenants = _read(FILE)
    ann, bob = (f"Bearer {TOKENS[name]}" for name in ("ann", "bob"))
    assert _who(tenants, _metadata(ann)) == "ann"
    assert _who(tenants, _metadata(bob.replace("Bearer ", "bearer  "))) == "bob"
    assert _who(tenants, [], _peer("cyd.example")) == "cyd"
    assert _who(tenants, [], {"x509_common_name": [b"Robert"]}) == "bob"
    assert _who(tenants, _metadata(bob), _peer("bob.example")) == "bob"
    assert _who(tenants, _metadata(ann), _peer("stranger")) == "ann"


@pytest.mark.parametrize(
    ("metadata", "peer"),
    [
        ([], {}),
        (_metadata("Bearer wrong"), {}),
        (_metadata(TOKENS["ann"]), {}),
        (_metadata(f"Basic {TOKENS['ann']}"), {}),
        (_metadata("Bearer "), {}),
        (_metadata(f"Bearer {DIGEST['ann']}"), {}),
        (_metadata(f"Bearer {TOKENS['ann']}", f"Bearer {TOKENS['bob']}"), {}),
        (_metadata("Bearer wrong"), _peer("bob.example")),
        (_metadata(f"Bearer {TOKENS['ann']}"), _peer("bob.example")),
        ([], _peer("stranger")),
        ([], _peer("bob.example", "cyd.example")),
        (_metadata("Bearer \udcff\u00e9"), {}),
    ],
)
def test_who_does_not(metadata: list[tuple[str, str]], peer: Any) -> None:
    with pytest.raises(Unauthenticated):
        _who(_read(FILE), metadata, peer)


def test_a_server_without_a_file_of_tenants() -> None:
    anyone = only_tenant(10, 0, None, has_client_ca=False)
    assert _who(anyone, _metadata("Bearer whatever")) == "default"
    with_token = only_tenant(10, 0, TOKENS["ann"], has_client_ca=True)
    assert _who(with_token, _metadata(f"Bearer {TOKENS['ann']}"), _peer("x")) == "default"
    with pytest.raises(Unauthenticated):
        _who(with_token, [], _peer("x"))
    with_ca = only_tenant(10, 0, None, has_client_ca=True)
    assert _who(with_ca, [], _peer("x")) == "default"
    with pytest.raises(Unauthenticated):
        _who(with_ca, [])


def caller(name: str) -> Caller:
    return Caller(Tenant(name, 1))


def test_a_ticket_opens_one_connection() -> None:
    tickets = Tickets(10, 5.0)
    first, second = tickets.issue_ticket(caller("ann")), tickets.issue_ticket(caller("bob"))
    assert len(first) == 32 and first != second
    assert (tickets.use_ticket(second), tickets.use_ticket(second)) == (caller("bob"), None)
    assert (tickets.use_ticket(first), tickets.use_ticket(b"x" * 32), len(tickets)) == (
        caller("ann"),
        None,
        0,
    )


def test_a_ticket_does_not_last() -> None:
    now = [100.0]
    tickets = Tickets(10, 5.0, lambda: now[0])
    early = tickets.issue_ticket(caller("ann"))
    now[0] += 4.9
    late = tickets.issue_ticket(caller("ann"))
    assert tickets.use_ticket(early) == caller("ann")
    now[0] += 5.0
    assert (tickets.use_ticket(late), len(tickets)) == (None, 0)


def test_tickets_are_bounded_for_each_tenant() -> None:
    now = [0.0]
    tickets = Tickets(2, 5.0, lambda: now[0])
    for _ in range(2):
        tickets.issue_ticket(caller("ann"))
    with pytest.raises(TooMuch, match="2 tickets of ann"):
        tickets.issue_ticket(caller("ann"))
    tickets.issue_ticket(caller("bob"))
    now[0] = 5.0
    tickets.issue_ticket(caller("ann"))
    assert len(tickets) == 1


def test_of_many_threads_one_uses_a_ticket() -> None:
    tickets = Tickets(10, 5.0)
    ticket = tickets.issue_ticket(caller("ann"))
    found: list[Caller | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(tickets.use_ticket(ticket))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=bool) == [None] * 7 + [caller("ann")]


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "server.secret"
    secrets = []
    threads = [threading.Thread(target=lambda: secrets.append(read_secret(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(secrets)) == 1 and len(secrets) == 8 and len(secrets[0]) == 32
    assert read_secret(path) == secrets[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_secret_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 31)
    path.chmod(0o600)
    with pytest.raises(TierConfigError, match="has 31 bytes and 32 are needed"):
        read_secret(path)
    path.write_bytes(hashlib.sha256(b"").digest())
    path.chmod(0o640)
    with pytest.raises(TierConfigError, match=f"chmod 600 {path}"):
        read_secret(path)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)  # nobody ever writes to it
    for other in (link, tmp_path, pipe, Path("/proc/no/such")):
        with pytest.raises(TierConfigError, match=r"--secret-file|chmod"):
            read_secret(other)
        assert str(other) not in open_paths()
    if os.geteuid():
        path.chmod(0)
        with pytest.raises(TierConfigError, match="cannot be read"):
            read_secret(path)
