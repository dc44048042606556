# SPDX-License-Identifier: Apache-2.0
"""Models by their id: what is taken from a Hub, what never, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.engine.config.resolve import resolve
from stratakv.engine.models.checkpoint.hub import is_hub_id

from ...nursery_site import nursery_client
from ...tiny_models import make_model
from .small_hub import Repository, SmallHub, serving

pytestmark = pytest.mark.timeout(600)

ID = "acme/tiny-llama"
SECONDS = 120  # of one process, on a machine that is busy
STRATAKV = [sys.executable, "-m", "stratakv.engine.cli.main"]
FETCH = """from stratakv.engine.config.engine_options import model_directory
print(model_directory(*{words!r}))"""
NEVER = {
    "modeling_evil.py": b"raise SystemExit('ran')",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"a second copy",
    "onnx/model.onnx": b"onnx",
    "tokenizer.model": b"sentencepiece",
}
TRAVERSING = (
    "../../../evil.json",
    "sub/../../config.json",
    "/etc/passwd",
    "..%2f..%2fx.safetensors",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a random model in several shards, tokenizer and chat template among them."""
    path = make_model(
        tmp_path_factory.mktemp("model"), "llama", max_shard_size="40KB", vocab_size=4096,
        hidden_size=16, intermediate_size=16, num_attention_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    files = {each.name: each.read_bytes() for each in path.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = (EMBEDDED_MODEL / name).read_bytes()
    files["chat_template.jinja"] = b"{{ messages[0].content }}"
    return files


@pytest.fixture
def hub(checkpoint: dict[str, bytes]) -> Iterator[SmallHub]:
    config = json.loads(checkpoint["config.json"])
    tuned = checkpoint | {
        "config.json": json.dumps(config | {"max_position_embeddings": 64}).encode()
    }
    bare = {name: data for name, data in checkpoint.items() if "safetensors" not in name}
    whole = Repository({"main": checkpoint | NEVER, "tuned": tuned}, listed=TRAVERSING)
    repositories = {
        ID: whole,
        "acme/bare": Repository({"main": bare | {"pytorch_model.bin": b"pickle"}}),
        "acme/private": Repository({"main": checkpoint}, token="hf_right"),
        "acme/gated": Repository({"main": checkpoint}, is_gated=True),
    }
    with serving(SmallHub(repositories)) as hub:
        yield hub


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(hub: SmallHub, place: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    # Certificates and proxies of this machine are for other hosts than this one.
    common = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(place / "hf"), "NO_PROXY": "*"}
    return kept | common | variables


@pytest.fixture
def fetch(hub: SmallHub, tmp_path: Path) -> Run:
    """Asks for a model in a process of its own, which reads the environment anew."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return nursery_client.run(
            [sys.executable, "-c", FETCH.format(words=words)], cwd=tmp_path, timeout=SECONDS,
            env=environment(hub, tmp_path, **variables),
        )  # fmt: skip

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The sentence of a ConfigError."""
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: " in last, done.stderr
    return last


def directory(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_what_is_taken_and_what_never(
    hub: SmallHub, fetch: Run, checkpoint: dict[str, bytes], tmp_path: Path
) -> None:
    path = directory(fetch(ID))
    assert {each.name: each.read_bytes() for each in path.iterdir()} == checkpoint
    assert path.name == hub.repositories[ID].commit_of("main")
    assert sorted(hub.asked) == sorted(checkpoint), "nothing else was sent, and nothing twice"
    first_weights = min(i for i, name in enumerate(hub.asked) if name.endswith(".safetensors"))
    small = [name for name in checkpoint if "safetensors" not in name]
    assert max(map(hub.asked.index, small)) < first_weights, "weights are taken last"
    everything = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert not [each for each in everything if "evil" in each.name or "passwd" in each.name]


def test_the_cache_answers_without_the_hub(hub: SmallHub, fetch: Run) -> None:
    path = directory(fetch(ID))
    asked = hub.requests
    assert directory(fetch(ID)) == path
    assert directory(fetch(ID, HF_HUB_OFFLINE="1")) == path
    assert directory(fetch(ID, HF_ENDPOINT="http://127.0.0.1:9")) == path
    assert hub.requests == asked


def test_a_model_without_a_tokenizer_is_asked_for_one_where_that_can_be(
    hub: SmallHub, fetch: Run, checkpoint: dict[str, bytes]
) -> None:
    """Programs that need none leave it out of the cache."""
    bare = {name: data for name, data in checkpoint.items() if "tokenizer" not in name}
    hub.repositories[ID] = Repository({"main": bare})
    path = directory(fetch(ID))
    asked = hub.requests
    assert directory(fetch(ID)) == path
    assert hub.requests > asked and len(hub.asked) == len(bare)
    assert directory(fetch(ID, HF_HUB_OFFLINE="1")) == path


def test_another_revision_is_another_directory(hub: SmallHub, fetch: Run) -> None:
    paths = [directory(fetch(ID, *revision)) for revision in ((), ("tuned",))]
    lengths = [json.loads((path / "config.json").read_text()) for path in paths]
    assert [each["max_position_embeddings"] for each in lengths] == [512, 64]
    commit = hub.repositories[ID].commit_of("tuned")
    assert directory(fetch(ID, str(commit), HF_HUB_OFFLINE="1")) == paths[1]
    assert "has no revision 'nowhere'" in refused(fetch(ID, "nowhere"))
    assert "--revision takes a branch, tag or commit" in refused(fetch(ID, "../../refs/main"))


def test_offline_the_command_that_downloads_is_named(hub: SmallHub, fetch: Run) -> None:
    text = refused(fetch(ID, "tuned", HF_HUB_OFFLINE="1"))
    assert f"`hf download {ID} --revision tuned`" in text and "HF_HUB_OFFLINE is set" in text
    text = refused(fetch(ID, HF_ENDPOINT="http://127.0.0.1:9"))
    assert f"`hf download {ID}`" in text and hub.requests == 0


def test_a_private_model_needs_its_token(fetch: Run) -> None:
    text = refused(fetch("acme/private"))
    assert "neither a directory here nor a model on the Hub" in text and "HF_TOKEN" in text
    assert "may not be read with this token" in refused(fetch("acme/private", HF_TOKEN="hf_wrong"))
    assert directory(fetch("acme/private", HF_TOKEN="hf_right")).is_dir()


def test_what_the_hub_cannot_give(fetch: Run) -> None:
    assert "neither a directory here nor a model on the Hub" in refused(fetch("acme/nothing"))
    assert "is gated on the Hub: accept its terms at http" in refused(fetch("acme/gated"))
    text = refused(fetch("acme/bare"))
    assert "neither model.safetensors nor" in text and "it has 'pytorch_model.bin'" in text


def test_an_interrupted_download_goes_on(hub: SmallHub, fetch: Run, tmp_path: Path) -> None:
    names = [name for name in hub.repositories[ID].files("main") if name.startswith("model-")]
    hub.held_back = sorted(names)[1]
    first = nursery_client.popen(
        [sys.executable, "-c", FETCH.format(words=(ID,))], cwd=tmp_path,
        env=environment(hub, tmp_path),
    )  # fmt: skip
    try:
        assert hub.half_sent.wait(SECONDS)
    finally:
        first.kill()
    first.wait(SECONDS)
    hub.may_end.set()
    sent = hub.asked.copy()
    assert f"hf download {ID}" in refused(fetch(ID, HF_HUB_OFFLINE="1")), "it is not whole"
    hub.held_back = ""
    path = directory(fetch(ID))
    assert (path / sorted(names)[1]).stat().st_size == len(
        hub.repositories[ID].files("main")[sorted(names)[1]]
    )
    again = hub.asked[len(sent) :]
    assert again == sorted(names)[1:], "what was whole is not sent again"


def test_weights_that_an_index_names_elsewhere(
    hub: SmallHub, fetch: Run, checkpoint: dict[str, bytes]
) -> None:
    index = {"weight_map": {"a": "../../model.safetensors"}}
    for name, expected in (("../../x.safetensors", "a file beside it"), ("evil.py", "is no .safe")):
        index["weight_map"]["a"] = name
        files = checkpoint | {
            "model.safetensors.index.json": json.dumps(index).encode(),
            "evil.py": b"",
        }
        hub.repositories[ID] = Repository({"main": files})
        assert expected in refused(fetch(ID))
    assert "evil.py" not in hub.asked


def test_a_directory_of_that_name_wins(hub: SmallHub, fetch: Run, tmp_path: Path) -> None:
    (tmp_path / ID).mkdir(parents=True)
    assert directory(fetch(ID)) == Path(ID)
    assert hub.requests == 0


def test_a_plan_takes_the_configuration_alone(hub: SmallHub, tmp_path: Path) -> None:
    words = ["plan", ID, "--revision", "tuned", "--memory", "1GiB", "--no-probe", "--json"]
    done = nursery_client.run(
        [*STRATAKV, *words], cwd=tmp_path, env=environment(hub, tmp_path), timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["max_model_len"] == 64
    assert hub.asked == ["config.json", "generation_config.json"]


def test_an_id_is_generated_from(hub: SmallHub, tmp_path: Path) -> None:
    words = ["generate", ID, "--prompt", "To open", "--max-tokens", "3", "--ignore-eos"]
    done = nursery_client.run(
        [*STRATAKV, *words], cwd=tmp_path, env=environment(hub, tmp_path), timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "[3 tokens in " in done.stderr


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("org/model", True), ("meta-llama/Llama-3.1-8B", True), ("./org/model", False),
        ("/org/model", False), ("model", False), ("a/b/c", False), ("~/model", False),
        ("../model", False), ("org/..", False), ("org/", False), ("org/mödel", False),
    ],
)  # fmt: skip
def test_what_has_the_form_of_an_id(text: str, is_id: bool) -> None:
    assert is_hub_id(text) is is_id


def test_an_id_is_the_name_that_clients_ask_for() -> None:
    model = engine_config(ID, {}, is_fetched=False).model
    assert (model.served_name, model.path) == (ID, Path(ID))
    assert engine_config(ID, {"served_model_name": "x"}, is_fetched=False).model.served_name == "x"


def test_a_path_stays_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = resolve({"model": "./org/model"}, {})
    model = engine_config(settings.model, {}).model
    assert (settings.model, model.served_name) == ("./org/model", "model")


def test_settings_are_shown_without_a_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("asked for")

    monkeypatch.setattr("stratakv.engine.config.engine_options.fetch_model", fail)
    assert main(["config", "show", ID]) == 0
    assert f"model: {ID}" in capsys.readouterr().out
