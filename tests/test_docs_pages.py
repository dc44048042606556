# SPDX-License-Identifier: Apache-2.0
"""What every page shows is run: the pages that no other test follows, and the list of all that is
left out, with the reason.

`pages.py` says how, and has the commands that are not run (`NOT_RUN`).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stratakv.connector.vllm.settings import HOST
from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import COMMANDS, import_command, main
from stratakv.engine.config.cache_server_options import read_options
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.config.resolve import OTHER_VARIABLES
from stratakv.engine.config.schema import SCHEMA, variable_of

from .pages import COMMAND_PAGES, FOLDERS, NOT_RUN, ROOT, Block, Reader, blocks, find_block

# Who follows the others.
FOLLOWED = {
    "README.md": "test_readme.py", **dict.fromkeys(COMMAND_PAGES, "test_readme.py"),
    "docs/sizing.md": "test_docs_operating.py", "docs/upgrading.md": "test_docs_operating.py",
    "docs/troubles.md": "test_docs_operating.py",
    **{
        f"docs/tutorials/{path.name}": "test_docs_tutorials.py"
        for path in (ROOT / "docs" / "tutorials").glob("*.md")
    },
}  # fmt: skip
ALL = sorted(
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).glob("*.md")
)
# Pages and beginnings of blocks that are no commands → what they are, or who looks at them.
LEFT: Mapping[tuple[str, str], str] = {
    ("CONTRIBUTING.md", "benchmarks/    measures"): "a picture of the folders",
    ("deploy/README.md", "first engine: "): "compared by tests/test_two_engines_script.py",
    ("deploy/README.md", "prompt | computed on"): "compared by tests/test_cluster_script.py",
    ("deploy/README.md", "STRATAKV_ARGS="): "read below",
    ("docs/abi.md", "fingerprint = SHA-256"): "a formula",
    ("docs/abi.md", "root    = SHA-256"): "a formula",
    ("docs/abi.md", "[ num_layers, 2"): "a formula",
    ("docs/abi.md", "digest = xxh3-128"): "a formula",
    ("docs/abi.md", "checksum = HMAC"): "a formula",
    ("docs/cache-service.md", "engine A"): "a picture",
    ("docs/commands/serve.md", "model: /srv/models/x"): "read by tests/test_docs_commands.py",
    ("docs/commands/cache-server.md", "[[tenant]]"): "read by tests/test_docs_commands.py",
    ("docs/architecture.md", " clients ──HTTP"): "a picture",
    ("docs/architecture.md", "            evicted, or cold"): "a picture",
    ("docs/architecture.md", " core's thread"): "a picture",
    ("docs/life-of-a-block.md", " prompt --> request"): "a picture",
    ("docs/life-of-a-step.md", " engine core "): "a picture",
    ("docs/life-of-a-step.md", " device   | forward"): "a picture",
    ("docs/life-of-a-step.md", " admission "): "a picture",
    ("docs/pictures.md", "stratakv serve HuggingFaceTB"): "needs the Hub",
    ("docs/pictures.md", "import base64"): "run by tests/engine/api/test_pictures.py",
    ("docs/pictures.md", "from PIL"): "run by tests/engine/test_llm_pictures.py",
    ("docs/step-trace.md", "cmpl-5a1f: "): "compared by tests/engine/trace/test_commands.py",
    ("docs/tiers.md", "PATH/lock "): "a picture of the files",
    ("docs/tiers.md", "offload: prefill "): "compared by tests/test_readme.py",
    ("docs/tools.md", "[project.entry-points"): "read below: its class is nowhere",
    ("docs/vllm.md", " vLLM's KV cache ──evicted"): "a picture",
    ("docs/vllm.md", " vLLM's KV cache ──vLLM's"): "a picture",
    ("docs/vllm.md", '{"type": "StrataTier"'): "read below",
    ("docs/vllm.md", '{"kv_connector": "StrataConnector"'): "read below",
}
# What a reader takes away from a command: words in what it says, beside an exit code of 0.
EXPECTED: Mapping[str, tuple[str, ...]] = {
    "stratakv ping": ("SERVING",),
    "stratakv describe": ("cpu",),
    "curl -s 127.0.0.1:9402/metrics": ("stratakv_cache:",),
    "curl -s localhost:8000/v1": ('"choices"',),
    "curl -s http://127.0.0.1:8100/v1": ('"choices"',),
    "stratakv trace explain /tmp/steps.jsonl  ": ("prompt tokens",),
    "stratakv trace explain /tmp/steps.jsonl cmpl": ("It computed ", "It ended "),
    "stratakv trace export": ("steps.jsonl.json",),
    "stratakv config vllm --cpu": (),
    "grep -E '^(cbor2": (),
}


# Pages whose program prints → what, of which a reader sees the form.
PRINTED: Mapping[str, str] = {
    "docs/python.md": (
        r"(?P<one>\S+) 0 .+ (length|stop)\n(?P=one) 1 .+ (length|stop)\n"
        r"(?P<two>\S+) 0 .+ (length|stop)\n(?P=two) 1 .+ (length|stop)\n.+\n"
    ),
}


@dataclass(frozen=True)
class Page:
    """How a page is followed. `guests`: after the commands that begin so, a command of another
    page, which needs what runs then and is left out there. `installs`: its entry points count."""

    substitutes: tuple[tuple[str, str], ...] = ()
    guests: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    prepare: Callable[[Reader], None] = lambda reader: None
    installs: bool = False
    skips_guests: bool = True


def _bring_head(reader: Reader) -> None:
    from .eagle_heads import make_eagle  # torch, which most pages do without

    make_eagle(reader.home / "eagle", EMBEDDED_MODEL)


def _bring_deploy(reader: Reader) -> None:
    shutil.copytree(ROOT / "deploy", reader.home / "deploy")
    (reader.home / "units").mkdir()


def _bring_constraints(reader: Reader) -> None:
    shutil.copy(ROOT / "constraints.txt", reader.home)


_DRY = "--dry-run=client -o yaml"
PAGES: Mapping[str, Page] = {
    "CONTRIBUTING.md": Page((("make ", "make -n "),)),  # the suite would run this test
    "deploy/README.md": Page(
        (
            ("create namespace", f"create {_DRY} namespace"),
            ("create secret generic", f"create {_DRY} secret generic"),
            ("/etc/systemd/system/", "{home}/units/"),
        ),
        prepare=_bring_deploy,
    ),
    "docs/cache-service.md": Page(
        (("64GiB", "64MiB"), ("16GiB", "64MiB"), ("1TiB", "64MiB"), ("/mnt/nvme", "{home}")),
        {"stratakv serve": ("deploy/README.md", "curl -s http://127.0.0.1:8000/health")},
    ),
    "docs/embeddings.md": Page(),
    "docs/gpu.md": Page(prepare=_bring_constraints),
    "docs/lmcache.md": Page(),
    "docs/lora.md": Page(),
    "docs/logits-processors.md": Page(installs=True),
    "docs/prefill-decode.md": Page(
        (("stratakv cache-server", "stratakv cache-server --cpu-bytes 64MiB"),),
        {"stratakv route --prefill http://127": ("deploy/README.md", "curl -s http://127.0.0.1:81")},
    ),
    "docs/python.md": Page(),
    "docs/reasoning.md": Page((("serve MODEL", "serve"),)),
    "docs/scheduling.md": Page(installs=True),
    "docs/sglang.md": Page(),
    "docs/speculation.md": Page(
        (
            ("MODEL --speculative-model DRAFT", f"--speculative-model {EMBEDDED_MODEL}"),
            ("serve MODEL --speculative-model EAGLE_DIR", "serve --speculative-model {home}/eagle"),
        ),
        prepare=_bring_head,
    ),
    "docs/step-trace.md": Page(
        (("--step-trace", "--kv-offload-cpu-bytes 64MiB --step-trace"), ("/tmp/", "{home}/"))
    ),
    "docs/structured-outputs.md": Page(),
    "docs/tiers.md": Page((("/etc/stratakv/", "{home}/"),)),
    "docs/tools.md": Page(),
    "docs/vllm.md": Page(),
}  # fmt: skip


GUESTS = tuple(command for page in PAGES.values() for _, command in page.guests.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    reader = Reader(tmp_path, page.substitutes)
    page.prepare(reader)
    try:
        for block in blocks(name):
            if block.language == "toml" and not block.file_name and page.installs:
                _install(reader, block)
            elif _left(name, block):
                continue
            elif block.language == "sh" and not any(c.startswith("cd ") for c in block.commands):
                for command in block.commands:
                    _run(reader, page, command)
            else:
                reader.do(block)
                if block.language == "python" and not block.file_name and name in PRINTED:
                    printed = (tmp_path / "program.out").read_text()
                    assert re.fullmatch(PRINTED[name], printed, re.DOTALL), printed
    finally:
        reader.stop()


def _run(reader: Reader, page: Page, command: str) -> None:
    if command.startswith("kubectl") and shutil.which("kubectl") is None:
        return
    if page.skips_guests and command.startswith(GUESTS):
        return
    answer = reader.shell(command)
    for start, words in EXPECTED.items():
        if command.startswith(start):
            assert all(word in reader.said for word in words), f"{command}\n{reader.said}"
    if "/v1/completions" in command and "steps" not in command:
        _note_id(reader, json.loads(answer)["id"])
    for start, (other, guest) in page.guests.items():
        if command.startswith(start):
            _run(reader, Page(skips_guests=False), _command(other, guest))


def _command(page: str, start: str) -> str:
    """The one command of a page that begins so."""
    [found] = [each for block in blocks(page) for each in block.commands if each.startswith(start)]
    return found


def _note_id(reader: Reader, name: str) -> None:
    """The page's request is this one, once the trace has it."""
    reader.substitute("cmpl-5a1 ", f"{name} ")
    trace = reader.home / "steps.jsonl"
    deadline = time.monotonic() + 60
    while trace.exists() and f'"{name}' not in trace.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _install(reader: Reader, block: Block) -> None:
    """The entry points of the page's package, which pip would install beside it."""
    site = reader.home / "site-packages"
    about = site / "mypackage-1.dist-info"
    about.mkdir(parents=True)
    (site / "mypackage").symlink_to(reader.home / "mypackage")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1\n")
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join([*lines, ""]))


def _left(page: str, block: Block) -> bool:
    return any(page == name and block.text.startswith(start) for name, start in LEFT)


# That nothing is forgotten


def test_every_block_is_run_or_in_the_list() -> None:
    known = PAGES.keys() | FOLLOWED.keys()
    strange = [
        block.place
        for page in ALL
        for block in blocks(page)
        if not _left(page, block) and (page not in known or not _is_done(page, block))
    ]
    assert not strange, "nobody runs these; see PAGES, and LEFT for what is no command"


def _is_done(page: str, block: Block) -> bool:
    if block.language in ("sh", "python", "keys") or block.file_name:
        return True
    if block.language == "text":  # `Reader.do` compares it
        return True
    return block.language == "toml" and page in PAGES and PAGES[page].installs


def test_no_command_hides_in_an_indented_line() -> None:
    """Of Markdown's other form of a block nobody takes commands."""
    for page in ALL:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
        hidden = re.findall(r"\n\n {4,}(?![*\-|])\S.*", text)
        assert not hidden, page


def test_what_is_left_is_still_there() -> None:
    for page, start in LEFT:
        assert len([each for each in blocks(page) if each.text.startswith(start)]) == 1, start
    commands = [c for page in ALL for b in blocks(page) if b.language == "sh" for c in b.commands]
    for table in (NOT_RUN, EXPECTED):
        missing = [start for start in table if not any(c.startswith(start) for c in commands)]
        assert not missing, "in none of the pages"
    for name, page in PAGES.items():
        text = (ROOT / name).read_text()
        assert all(old in text for old, _ in page.substitutes), name


def test_a_new_command_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a page that nobody follows, and as a block that is neither run nor in the list."""
    for page, fence in (
        ("docs/glossary.md", "sh"),
        ("docs/tiers.md", ""),
        ("docs/vllm.md", "json"),
    ):
        text = (ROOT / page).read_text() + f"\n```{fence}\nstratakv check\n```\n"
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr("tests.pages.ROOT", tmp_path)
            [*_, last] = blocks(page)
        assert not _left(page, last)
        assert (page not in PAGES) or not _is_done(page, last)


# What can be read without being run


def _json_in(page: str, command: str) -> dict[str, object]:
    """The JSON that stands in single quotes in a command of the page."""
    found = _command(page, command)
    [text] = [word for word in shlex.split(found) if word.startswith("{")]
    given: dict[str, object] = json.loads(text)
    return given


@pytest.mark.parametrize(
    ("page", "command", "printed"),
    [
        ("docs/lmcache.md", "lmcache server", "stratakv config lmcache"),
        ("docs/sglang.md", "python -m sglang", "stratakv config sglang"),
    ],
)
def test_what_is_pasted_is_what_the_command_prints(
    page: str, command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _command(page, printed)
    assert main(shlex.split(line)[1:]) == 0
    assert json.loads(capsys.readouterr().out) == _json_in(page, command)


def test_what_is_not_run_could_be_given() -> None:
    """Commands of ours and their flags."""
    lines = [c for page in ALL for b in blocks(page) if b.language == "sh" for c in b.commands]
    ours = [c for c in lines if c.startswith("stratakv") and c.startswith(tuple(NOT_RUN))]
    assert len(ours) >= 5
    for line in ours:
        _, name, *given = shlex.split(line, comments=True)
        assert name in COMMANDS, line
        command = import_command(name)
        parser = Parser(prog="probe")
        if given[0] == "vllm":  # of doctor
            del given[0]
            command.add_vllm_arguments(parser)
        else:
            command.add_arguments(parser)
        _, unknown = parser.parse_known_args(given)
        assert not unknown, f"{line}: {unknown}"


def test_the_settings_of_the_vllm_page_are_taken() -> None:
    tier = json.loads(find_block("docs/vllm.md", '{"type"').text)
    assert (tier.pop("type"), tier.pop("module_path")) == ("StrataTier", "stratakv.connector.vllm")
    assert HOST.read(tier).ssd.path == Path("/nvme/kv")
    connector = json.loads(find_block("docs/vllm.md", '{"kv_connector"').text)
    assert HOST.read(connector["kv_connector_extra_config"]["stratakv"]).cpu.capacity_bytes


def test_the_environment_of_the_units() -> None:
    lines = find_block("deploy/README.md", "STRATAKV_ARGS=").text.splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert names <= {variable_of(name) for name in SCHEMA} | OTHER_VARIABLES.keys()


def test_the_variables_of_the_image() -> None:
    run = _command("deploy/README.md", "podman run --rm -p 9400")
    given = dict(word.split("=", 1) for word in shlex.split(run) if word.startswith("STRATAKV_"))
    options = read_options({}, given)
    assert options.cpu_bytes == 8 * 2**30 and options.ssd_bytes == 100 * 2**30
    assert len(given) == 5


def test_the_group_of_tool_parsers() -> None:
    groups = tomllib.loads(find_block("docs/tools.md", "[project.entry").text)["project"]
    [group] = groups["entry-points"]
    assert f'"{group}"' in (ROOT / "engine/text/tool_calls/tool_formats.py").read_text()


@pytest.mark.net
@pytest.mark.slow
def test_wheels_for_a_machine_with_a_gpu(tmp_path: Path) -> None:
    """As `docs/gpu.md` has them downloaded: the engine's, the library, those of `serve`."""
    reader = Reader(tmp_path)
    _bring_constraints(reader)
    begins = ("mkdir -p .whl", "pip download", "grep -E '^(annotated-types")
    for begin, count in zip(begins, (4, 5, 15), strict=True):
        script = "\n".join(find_block("docs/gpu.md", begin).commands)
        reader._run(["bash", "-c", "set -e\n" + script])
        assert len(list((tmp_path / ".whl").glob("*.whl"))) == count
