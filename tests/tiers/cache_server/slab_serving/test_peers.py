# SPDX-License-Identifier: Apache-2.0
"""Engines that read each other's slabs: real processes, real sockets, slabs that change under
them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.slab_serving import serving
from stratakv.tiers.cache_server.slab_serving.serving import SlabServing
from stratakv.tiers.contract import make_keys
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.peer_tier import PeerTier
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import open_remote
from stratakv.tiers.slab.cpu_slab import KEPT_SHARE, CpuSlab
from stratakv.tiers.tier_settings import ListenAddress, ServeSettings
from stratakv.tiers.wire.frames import pack_keys

from ....free_ports import free_ports
from ..rig import LAYOUT, WAIT_SECONDS, token_of
from .rig import NAMESPACE, Served, fetch, fill, opened, served, wait_for

SOON = 5.0


def kill(made: Served) -> int:
    """Kill the process that serves; its number."""
    process = made.serving._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    return process.pid


def assert_fetched(tier: PeerTier, keys: Sequence[bytes], wanted: list[bool]) -> None:
    """These come, perhaps after more than one try: on a busy machine a look-up ends before its
    answer."""
    wait_for(lambda: fetch(tier, keys) == wanted, f"{sum(wanted)} of {len(keys)} blocks")


def test_blocks_of_another_engine_are_found_and_read() -> None:
    keys = make_keys(40)
    with served() as made, made.tier() as tier:
        fill(made.slab, keys[:30])
        assert_fetched(tier, keys, [True] * 30 + [False] * 10)
        assert tier.lookup(keys[:1]) == [Answer.HIT]
        # What comes later is found too, and what has gone is a miss.
        fill(made.slab, keys[30:])
        made.slab.forget(keys[:5])
        assert_fetched(tier, keys, [False] * 5 + [True] * 35)
        made.slab.clear()
        assert_fetched(tier, keys[5:10], [False] * 5)
        stats = tier.stats()
        assert stats.hits >= 65 and stats.capacity_blocks == 64
        wait_for(
            lambda: made.serving.stats()["served_blocks"] >= stats.hits,
            "the count of what was sent",
        )
        sent = made.serving.stats()
        assert sent["served_bytes"] == sent["served_blocks"] * LAYOUT.page_bytes
        assert (sent["serving_up"], sent["serving_starts"], sent["served_held_blocks"]) == (1, 1, 0)


def test_nothing_is_stored_or_deleted_at_another_engine() -> None:
    keys = make_keys(4)
    with served() as made, made.tier() as tier:
        fill(made.slab, keys)
        assert_fetched(tier, keys, [True] * 4)
        memory = [memoryview(bytearray(LAYOUT.slot_bytes))] * 4
        assert tier.store(keys, memory).result(SOON) == [Stored.REFUSED] * 4
        tier.drop(keys)
        tier.clear()
        assert made.slab.lookup(keys) == [Answer.HIT] * 4
        # Nor by a client of another kind.
        stub = tier._peers[0].link._stub
        metadata = tier._peers[0].link._metadata
        with pytest.raises(grpc.RpcError, match="an engine's own") as refused:
            stub.delete(
                messages.DeleteRequest(keys=pack_keys(keys)), timeout=SOON, metadata=metadata
            )
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.RpcError, match="an engine's own"):
            stub.delete(messages.DeleteRequest(all=True), timeout=SOON, metadata=metadata)
        assert_fetched(tier, keys, [True] * 4)


def test_blocks_of_another_model_or_layout_are_not_taken() -> None:
    keys = make_keys(4)
    with served() as made:
        fill(made.slab, keys)
        with made.tier(namespace=b"another model".ljust(32)) as tier:
            wait_for(
                lambda: fetch(tier, keys) != [False] * 4 or bool(tier.stats().rejected),
                "blocks that are looked at",
            )
            assert fetch(tier, keys) == [False] * 4
            assert tier.stats().rejected["checksum"] >= 4
        other = BlockLayout(2, 16, 1, 32, "float32")
        tier = PeerTier([made.address()], other, RemoteSettings(namespace=NAMESPACE))
        wait_for(lambda: tier.stats().errors.get("layout", 0) > 0, "a refusal")
        assert not tier.is_up
        tier.close(SOON)


def test_bytes_that_changed_are_a_miss() -> None:
    keys = make_keys(3)
    with served() as made, made.tier() as tier:
        slots = fill(made.slab, keys)
        assert slots[1] is not None
        made.slab.buffer(slots[1])[7] ^= 1
        assert_fetched(tier, keys, [True, False, True])
        assert tier.stats().rejected["checksum"] >= 1


def test_each_block_is_read_from_who_has_it() -> None:
    keys = make_keys(30)
    with served() as one, served() as two:
        fill(one.slab, keys[:15])
        fill(two.slab, keys[10:25])
        (nobody,) = free_ports(1)
        places = [one.address(), two.address(), ServerAddress("127.0.0.1", nobody)]
        with opened(places) as tier:
            wait_for(lambda: sum(p.link.is_up for p in tier._peers) == 2, "both engines")
            assert_fetched(tier, keys, [True] * 25 + [False] * 5)
            two.serving.close(WAIT_SECONDS)
            wait_for(lambda: fetch(tier, keys) == [True] * 15 + [False] * 15, "the other's")


def test_what_is_leased_is_not_evicted_and_half_is_left() -> None:
    keys, others = make_keys(64), make_keys(64, "others")
    with served() as made, made.tier() as tier:
        fill(made.slab, keys)
        link = tier._peers[0].link
        assert link.pin_blocks(keys[:20], 60.0).result(SOON) == 20
        request = messages.PinRequest(keys=pack_keys(keys[20:40]), lease_ms=1000)
        with pytest.raises(grpc.RpcError, match="too few for the engine"):
            link._stub.pin(request, timeout=SOON, metadata=link._metadata)
        # The engine needs its memory, and gets all but that.
        assert fill(made.slab, others).count(None) == 20
        assert made.slab.lookup(keys) == [Answer.HIT] * 20 + [Answer.MISS] * 44
        assert_fetched(tier, keys, [True] * 20 + [False] * 44)
        # A process that dies holds nothing any more.
        kill(made)
        wait_for(lambda: not made.slab.index.is_held(0), "the end of holds")  # type: ignore[union-attr]
        assert fill(made.slab, make_keys(64, "more")).count(None) == 0


def test_an_engine_keeps_its_own_for_others() -> None:
    slab = CpuSlab(LAYOUT, 10 * LAYOUT.slot_bytes, is_served=True)
    keys, others = make_keys(10), make_keys(10, "others")
    fill(slab, keys)
    assert slab.keep([*keys[:8], others[0]], 60.0) == [True] * 8 + [False]
    # Of the slots no more than a share is kept; the rest is evicted as ever.
    kept = int(KEPT_SHARE * 10)
    assert fill(slab, others).count(None) == kept
    assert slab.lookup(keys) == [Answer.HIT] * kept + [Answer.MISS] * (10 - kept)
    # What is forgotten is not found, and its slot is not used before the time is over.
    slab.forget(keys[:1])
    assert slab.lookup(keys[:1]) == [Answer.MISS]
    assert slab.free_slots() == 0
    slab.close()
    alone = CpuSlab(LAYOUT, 10 * LAYOUT.slot_bytes)
    fill(alone, keys)
    assert alone.keep(keys, 60.0) == [False] * 10
    alone.close()


def test_blocks_that_are_kept_already_are_kept_for_longer() -> None:
    slab = CpuSlab(LAYOUT, 10 * LAYOUT.slot_bytes, is_served=True)
    keys, others = make_keys(10), make_keys(10, "others")
    fill(slab, keys)
    share, seconds = int(KEPT_SHARE * 10), 1.0
    assert slab.keep(keys[:share], seconds) == [True] * share
    assert slab.keep(keys[:share], 60.0) == [True] * share
    time.sleep(seconds)
    assert fill(slab, others).count(None) == share
    assert slab.lookup(keys[:share]) == [Answer.HIT] * share
    slab.close()


def test_engine_that_is_taken_for_a_cache_server_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would store nothing, and hand-overs would wait for it."""
    with served() as made:
        remote = open_remote([made.address()], LAYOUT, RemoteSettings(namespace=NAMESPACE))
        wait_for(lambda: remote.stats().errors.get("read_only", 0) > 1, "two refusals")
        assert not remote.wait_up(0.0)
        remote.close(SOON)
    told = [line for line in caplog.messages if "name it in --kv-peers" in line]
    assert len(told) == 1, caplog.messages


def test_watchers_hear_of_what_comes() -> None:
    keys = make_keys(3)
    heard = threading.Event()
    with served() as made, made.tier() as tier:
        assert tier.watch(lambda _keys: heard.set())
        wait_for(heard.is_set, "the beginning of the watch")
        heard.clear()
        fill(made.slab, keys)
        wait_for(lambda: tier.lookup(keys) == [Answer.HIT] * 3, "news of blocks")
        made.slab.forget(keys[:1])
        wait_for(lambda: tier.lookup(keys[:1]) == [Answer.MISS], "news of their end")


def test_blocks_that_come_and_go_while_they_are_read() -> None:
    """The slab turns over all the time; whatever comes is what was stored under its key."""
    rng = random.Random(7)
    keys = make_keys(100)
    ended = threading.Event()
    with served(slots=32) as made, made.tier() as tier:

        def turn_over() -> None:
            while not ended.is_set():
                fill(made.slab, rng.sample(keys, 6))
                time.sleep(0.0005)

        threads = [threading.Thread(target=turn_over) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            found = rounds = 0
            deadline = time.monotonic() + WAIT_SECONDS
            while rounds < 100 or (found <= 50 and time.monotonic() < deadline):
                tier.clear()  # of what it believes, which is old at once here
                found += sum(fetch(tier, rng.sample(keys, 8)))
                rounds += 1
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert found > 50
        assert made.slab.stats().evicted_blocks > 100


def test_process_that_is_killed_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    keys = make_keys(8)
    with served() as made, made.tier() as tier:
        fill(made.slab, keys)
        port = made.serving.port
        for starts in (2, 3):
            assert_fetched(tier, keys, [True] * 8)
            first = kill(made)
            wait_for(lambda s=starts: made.serving.num_starts == s, "another process")  # type: ignore[misc]
            wait_for(lambda: fetch(tier, keys) == [True] * 8, "the blocks once more")
            assert made.serving.port == port
            assert made.serving._process.pid != first  # type: ignore[union-attr]
        assert made.slab.keep(keys, 1.0) == [True] * 8
        made.serving.close(WAIT_SECONDS)
        # Nobody could load what is kept now, so nothing is.
        assert made.slab.keep(keys, 1.0) == [False] * 8
    assert "is gone (it ended with exit status -9); it is started again" in caplog.text


def test_process_that_hangs_is_given_up_and_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SILENT_SECONDS", 4.0)
    keys = make_keys(8)
    with served() as made, made.tier() as tier:
        fill(made.slab, keys)
        hung = made.serving._process
        assert hung is not None
        hung.send_signal(signal.SIGSTOP)
        wait_for(lambda: made.serving.num_starts >= 2, "another process")
        wait_for(lambda: fetch(tier, keys) == [True] * 8, "the blocks once more")
        assert hung.poll() is not None
    assert "it hung: nothing was heard of it for 4 s" in caplog.text


def test_process_ends_with_the_engine_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import sys, time\n"
        "from tests.tiers.cache_server.slab_serving.rig import Served\n"
        "made = Served()\n"
        "print(made.serving._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).resolve().parents[4]
    engine = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(root)),
        cwd=root,
    )
    assert engine.stdout is not None
    child = int(engine.stdout.readline())
    engine.kill()
    engine.wait()
    engine.stdout.close()
    wait_for(lambda: not _is_running(child), "the end of the process that serves")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_over_tls_with_a_token(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "cert.pem").write_bytes(b"".join(p.bytes() for p in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(token_of(name))
        (tmp_path / name).chmod(0o600)
    keys = make_keys(4)
    with served(
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        token_file=tmp_path / "right",
    ) as made:
        fill(made.slab, keys)
        given = {"ca_file": tmp_path / "ca.pem", "server_name": "localhost"}
        address = made.address(tls=True)
        right, wrong = (
            Credentials(token_file=tmp_path / name, **given) for name in ("right", "wrong")
        )
        with opened([address], credentials=right) as t:
            assert t.wait_up(WAIT_SECONDS)
            assert_fetched(t, keys, [True] * 4)
        with opened([address], credentials=wrong) as t:
            wait_for(lambda: t.stats().errors.get("unauthenticated", 0) > 0, "a refusal")
            assert not t.is_up
            assert_fetched(t, keys, [False] * 4)


@pytest.mark.parametrize(
    ("host", "settings", "words"),
    [
        ("0.0.0.0", {}, "no TLS (--kv-serve-tls-cert, --kv-serve-tls-key)"),
        ("127.0.0.1", {"tls_cert": Path("/none")}, "--kv-serve-tls-key go together"),
        ("127.0.0.1", {"token_file": Path("/none")}, "--kv-serve-token-file names /none"),
        ("127.0.0.1", {"tls_cert": Path("/none"), "tls_key": Path("/none")}, "/none"),
        (
            "no.such.host.invalid",
            {"insecure": True},
            "no.such.host.invalid is no address of this machine",
        ),
    ],
)
def test_what_cannot_be_served_says_why(host: str, settings: dict[str, Any], words: str) -> None:
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes, is_served=True)
    with pytest.raises(TierConfigError) as refused:
        SlabServing(slab, ListenAddress(host, 0), ServeSettings(**settings), namespace=NAMESPACE)
    assert words in str(refused.value)
    slab.close()


@pytest.mark.parametrize(
    ("token", "words"), [("\n", "has 0 characters"), ("x" * 5000, "has 4097 characters")]
)
def test_token_that_is_none_lets_nobody_in(tmp_path: Path, token: str, words: str) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(0o600)
    with pytest.raises(TierConfigError, match=words) as refused:
        Served(token_file=file)
    assert "--kv-serve-token-file" in str(refused.value)


def test_port_in_use_says_so() -> None:
    with served() as made, pytest.raises(TierConfigError, match="is in use"):
        Served(port=made.serving.port)


def test_process_that_ends_before_it_is_ready_says_how(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_MODULE", "stratakv.no_such_module")
    with pytest.raises(TierConfigError, match="--kv-serve: it ended with exit status 1"):
        Served()
    assert "No module named stratakv.no_such_module" in caplog.text


def test_slab_without_an_index_is_not_served() -> None:
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
    with pytest.raises(TierConfigError, match="made for it"):
        SlabServing(slab, ListenAddress("127.0.0.1", 0), ServeSettings(), namespace=b"")
    slab.close()


def test_process_started_by_hand_says_what_it_is() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "stratakv.tiers.cache_server.slab_serving.slab_process"],
        input=b"hello\n",
        capture_output=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    assert b"stratakv serve --kv-serve" in ended.stderr
