# SPDX-License-Identifier: Apache-2.0
"""The commands and the Python of README.md and the pages of commands are run as they stand there.

Two models of the examples are made: `./Llama-3.1-8B` with its real context, rope and dtype but two
narrow layers of random weights and a small vocabulary, and `./Qwen3-8B` as its real config.json
alone, which is all that `plan` reads. `SUBSTITUTES` is all that is done otherwise than a reader
would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme

from .pages import COMMAND_PAGES, ROOT, Reader, blocks, check_form, find_block
from .real_models import LLAMA_3_1_8B, QWEN3_8B, write_config, write_small

# Half a minute on a quiet machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGES = ("README.md", *COMMAND_PAGES)
# Its real width takes a gigabyte, and seconds a token.
NARROW = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
# What stands in the pages → what is run, and why.
SUBSTITUTES = (
    ("/mnt/nvme/kv", "{home}/nvme", "a disk that this machine need not have"),
    ("--kv-offload-cpu-bytes 16GiB", "--kv-offload-cpu-bytes 256MiB", "taken at the start"),
    ("--kv-offload-ssd-bytes 200GiB", "--kv-offload-ssd-bytes 512MiB", "taken at the start"),
    (
        'kv_offload="cpu,ssd")',
        'kv_offload="cpu,ssd", kv_offload_cpu_bytes="256MiB", kv_offload_ssd_bytes="512MiB")',
        "the defaults, 4 and 20 GiB, are taken at the start",
    ),
    ("--cpu-bytes 64GiB", "--cpu-bytes 256MiB", "more memory than this machine need have"),
    (
        "--ssd-path /mnt/nvme/cache --ssd-bytes 1TiB",
        "--ssd-path {home}/cache --ssd-bytes 64MiB",
        "the same",
    ),
    ("make ", "make -n ", "the demo takes a minute and the suite would run this test"),
)
# What a reader takes away from a command: words that its output holds.
EXPECTED: Mapping[str, tuple[str, ...]] = {
    "make demo": ("bench offload",),
    "make test": ("pytest",),
    "stratakv serve": ("stratakv-embedded",),
    "stratakv serve ./Llama-3.1-8B": ("Llama-3.1-8B", "context 131072", "bfloat16"),
    "stratakv plan ./Qwen3-8B": ("in bfloat16", "24", "40,960"),
    "stratakv cache-server": ("for clients of this user", "(cpu 256MiB, ssd none)"),
    "stratakv check": ("of them whole, 0 orphans",),
    "stratakv cache ls": ("/.cache/stratakv/ssd\n", "2 layers of 2 KV heads of 64"),
    "stratakv config show": ("block_size: 16",),
    "stratakv doctor": ("certificate",),
    "curl -s localhost:8000/metrics": ("vllm:", "stratakv:"),
}


def test_u01_every_block_of_the_readme_runs(tmp_path: Path) -> None:
    """In order, as one reader would: what one writes to the disk another looks at."""
    write_small(tmp_path / "Llama-3.1-8B", LLAMA_3_1_8B | NARROW)
    write_config(tmp_path / "Qwen3-8B", QWEN3_8B)
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    (tmp_path / "server.key").chmod(0o600)
    reader = Reader(tmp_path, [(old, new) for old, new, _ in SUBSTITUTES])
    seen: list[str] = []
    try:
        for page in PAGES:
            for block in blocks(page):
                if block.language == "python":
                    reader.stop()
                    assert "{'" in reader.python(block.text), "cached_tokens_by_tier is shown"
                    seen.append("python")
                elif block.language == "sh":
                    for command in block.commands:
                        _run(reader, command)
                        seen.append(command)
    finally:
        reader.stop()
    unseen = [start for start in EXPECTED if not any(line.startswith(start) for line in seen)]
    assert not unseen, "in none of the pages; take it out of the table"
    assert "python" in seen


def _run(reader: Reader, command: str) -> None:
    if command.startswith("stratakv doctor"):  # before a server is started
        reader.stop()
    if command.startswith("curl") and not reader.serves(8000):
        reader.shell("stratakv serve")
    answer = reader.shell(command)
    start = max((each for each in EXPECTED if command.startswith(each)), key=len, default="")
    for words in EXPECTED.get(start, ()):
        assert words in reader.said, f"{command}\n{reader.said}"
    if "--kv-offload cpu,ssd" in command:
        said = "\n".join(re.findall(r"offload: .*", reader.said))
        check_form(find_block("docs/tiers.md", "offload: prefill").text, said)
    if "/v1/completions" in command:
        said = json.loads(answer)
        [choice], usage = said["choices"], said["usage"]
        assert choice["text"] and usage["completion_tokens"] == 32
        assert "cached_tokens" in usage["prompt_tokens_details"], "which the page speaks of"


def test_what_is_done_otherwise_is_still_in_the_pages() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    missing = [old for old, _, _ in SUBSTITUTES if old not in text]
    assert not missing, "nothing to substitute; take it out of the table"


def test_the_readme_is_short_and_says_early_what_is_unproved() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    status = lines.index("## Status")
    assert status <= 30 and "**Alpha.**" in lines[status + 2] and "GPU" in lines[status + 2]
    assert "times sooner" in lines[2] and lines[4].endswith("(docs/first-token.svg)")
    assert max(line.count("](") for line in lines) <= 8, "a line that nobody reads"
    text = "\n".join(lines)
    assert "make demo" in text and "make test" in text and "](docs/figures.md)" in text
