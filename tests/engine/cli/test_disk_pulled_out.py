# SPDX-License-Identifier: Apache-2.0
"""A whole `stratakv serve` with an SSD tier on two disks, one of which is pulled out under load and
comes back: no request fails, no answer is another one, and the disk is in use again by itself.

The disk is ext4 on a loop device, whose own shutdown makes every call to it fail; without loop
devices `tests/tiers/ssd/test_disk_pulled_out.py` has the store alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...nursery_site.nursery_client import Nursery
from ...tiers.ssd.loop_disk import PulledDisk, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_SECONDS = 120.0
NUM_PROMPTS, PROMPT_TOKENS, VOCAB = 24, 200, 250
# A pool and a cpu tier that hold a few prompts, so that most come from the disks; in float64 a
# block is the same in whatever steps it was computed.
FLAGS = (
    "--port", "0", "--num-blocks", "60", "--num-threads", "1", "--dtype", "float64",
    "--kv-offload", "cpu,ssd", "--kv-offload-load", "always", "--kv-offload-cpu-bytes", "1MiB",
    "--kv-offload-ssd-bytes", "24MiB", "--kv-offload-ssd-admission", "all",
)  # fmt: skip


@pytest.fixture
def disk() -> Iterator[PulledDisk]:
    if why_not() is not None:
        pytest.skip(str(why_not()))
    with tempfile.TemporaryDirectory(prefix="stratakv-test-", dir="/dev/shm") as folder:
        try:
            made = PulledDisk(Path(folder))
        except Exception as error:  # what a container forbids shows only when it is tried
            pytest.skip(f"a loop device cannot be mounted here: {error}")
        yield made
        made.close()


class Client:
    """Asks for the same prompts again and again."""

    def __init__(self, url: str) -> None:
        self._url = url
        rng = random.Random(3)
        self._prompts = [
            [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
        ]
        self.num_asked = 0

    def read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            whole: bytes = answer.read()
            return whole

    def ask(self, number: int) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt's came from a disk."""
        body = {"prompt": self._prompts[number], "max_tokens": 4, "temperature": 0}
        whole = json.loads(self.read("/v1/completions", {**body, "return_token_ids": True}))
        self.num_asked += 1
        tiers = whole["usage"]["prompt_tokens_details"].get("cached_tokens_by_tier") or {}
        return whole["choices"][0]["token_ids"], tiers.get("ssd", 0)

    def ask_all(self) -> tuple[list[list[int]], int]:
        answers = [self.ask(number) for number in range(NUM_PROMPTS)]
        return [tokens for tokens, _ in answers], sum(found for _, found in answers)

    def figure(self, name: str, label: str) -> float:
        """Of `/metrics`; 0 where there is none yet."""
        text = self.read("/metrics").decode()
        found = re.search(rf"^{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_of_two_disks_one_goes_and_comes_back(
    tiny_model: Path, disk: PulledDisk, tmp_path: Path, worker_nursery: Nursery
) -> None:
    paths = f"{tmp_path / 'a'},{disk.path / 'b'}"
    words = ["serve", str(tiny_model), *FLAGS, "--kv-offload-ssd-path", paths]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = worker_nursery.popen(
            [sys.executable, "-m", "stratakv.engine.cli.main", *words],
            env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=out.fileno(), stderr=out.fileno(),
        )  # fmt: skip
    wrong: list[object] = []
    ended = threading.Event()

    def told() -> str:
        return log.read_text()

    try:
        wait_until(lambda: " at http://" in told() or process.poll() is not None)
        address = re.search(r" at (http://127\.0\.0\.1:\d+) ", told())
        assert address, told()
        client = Client(address[1])
        wait_until(lambda: _answers(client))
        right, _ = client.ask_all()
        wait_until(lambda: client.figure("stratakv:tier_blocks", 'tier="ssd"') > 100)
        again, from_disks = client.ask_all()
        assert again == right and from_disks > 0

        def ask_on() -> None:
            rng = random.Random(1)
            while not ended.is_set():
                number = rng.randrange(NUM_PROMPTS)
                try:
                    if client.ask(number)[0] != right[number]:
                        wrong.append(f"another answer to prompt {number}")
                except Exception as error:
                    wrong.append(error)
                    return

        asking = threading.Thread(target=ask_on)
        asking.start()
        disk.pull()
        wait_until(lambda: "b is gone; the tier goes on without it" in told())
        blocks_left = client.figure("stratakv:tier_blocks", 'tier="ssd"')
        gone, from_the_other = client.ask_all()
        assert gone == right and from_the_other > 0, "the other serves on"
        assert client.figure("stratakv:tier_errors_total", 'kind="disk gone"') == 1
        disk.put_back()
        wait_until(lambda: "b tier is open and in use" in told())
        begun = client.num_asked
        wait_until(lambda: client.num_asked > begun + NUM_PROMPTS)
        ended.set()
        asking.join(WAIT_SECONDS)
        assert client.figure("stratakv:tier_blocks", 'tier="ssd"') > blocks_left
        assert client.ask_all()[0] == right
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0, told()
    finally:
        ended.set()
        process.kill()
        process.wait(WAIT_SECONDS)
    assert not wrong and "Traceback" not in told()


def _answers(client: Client) -> bool:
    try:
        return bool(client.read("/health") is not None)
    except OSError:
        return False
