# SPDX-License-Identifier: Apache-2.0
"""The settings of adapters: the forms in which they are named, and what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_config import EngineConfig, ModelConfig
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.config.lora_config import LoraConfig, LoraModule, lora_modules
from stratakv.tiers.settings.values import ConfigError

A, B = LoraModule("a", Path("/x")), LoraModule("b/c", Path("y z"))
CALLED = "--lora-modules"


@pytest.mark.parametrize(("given", "modules"), [
    ("a=/x", (A,)),
    (" a=/x, b/c=y z ", (A, B)),
    ('{"name": "a", "path": "/x", "base_model_name": "base"}', (A,)),
    ('[{"name": "a", "path": "/x"}, "b/c=y z"]', (A, B)),
    (["a=/x", {"name": "b/c", "path": "y z"}], (A, B)),
    ((A, B), (A, B)),
    ({"a": "/x", "b/c": Path("y z")}, (A, B)),
    ({"a": "~/x"}, (LoraModule("a", Path.home() / "x"),)),
    ("a=b=c", (LoraModule("a", Path("b=c")),)),
    ("[]", ()),
])  # fmt: skip
def test_adapters_are_named_in_several_forms(given: Any, modules: tuple[LoraModule, ...]) -> None:
    assert lora_modules(CALLED, given) == modules
    shown = ",".join(map(str, modules))
    assert not modules or lora_modules(CALLED, shown) == modules


@pytest.mark.parametrize(("given", "said"), [
    ("a", "takes name=path, with commas between several, not 'a'"),
    ("", "takes name=path"),
    ("a=/x,", "takes name=path"),
    (None, "takes name=path"),
    (3, "takes name=path"),
    ("=/x", "the name in --lora-modules takes a text that is not empty"),
    ("a=", "the path in --lora-modules takes a text"),
    ("{", "is no JSON"),
    ("[" * 100_000, "is no JSON"),
    ('{"name": 1, "path": "/x"}', "the name in --lora-modules takes a text"),
    ('{"name": "a"}', "takes objects with a name and a path"),
    ({"a": 3}, "the path in --lora-modules"),
    ({"a\n": "/x"}, "control characters"),
    ({"a,b": "/x"}, "without `,` and `=`"),
    ({"a=b": "/x"}, "without `,` and `=`"),
    ({"a": "/x,y"}, "paths without commas"),
    ({"a" * 257: "/x"}, "up to 256 characters, not 257"),
    ("a=/x,a=/y", "names 'a' twice; give each its own name"),
    (["a=/x", {"a": "/y"}], "names 'a' twice"),
], ids=lambda each: str(each)[:30])  # fmt: skip
def test_other_forms_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        lora_modules(CALLED, given)
    assert said in str(raised.value)
    assert "is no JSON" in said or "is no JSON" not in str(raised.value)


@pytest.mark.parametrize(("given", "said"), [
    ({"max_loras": 2}, "--max-loras is given and no adapters are taken; add --lora-modules"),
    ({"max_lora_rank": 8}, "--max-lora-rank is given and no adapters"),
    ({"max_cpu_loras": 8}, "--max-cpu-loras is given and no adapters"),
    ({"enable_lora": True, "max_cpu_loras": 2, "max_loras": 3},
     "--max-cpu-loras 2 cannot hold the adapters of one step (--max-loras 3)"),
    ({"lora_modules": "a=/x,b=/x,c=/x", "max_cpu_loras": 2, "max_loras": 1},
     "names 3 adapters and --max-cpu-loras is 2"),
    ({"enable_lora": True, "max_loras": 0}, "--max-loras"),
    ({"enable_lora": True, "max_loras": 257}, "--max-loras"),
    ({"enable_lora": True, "max_lora_rank": 1025}, "--max-lora-rank"),
    ({"lora_modules": "tiny=/x", "served_name": "tiny"}, "the name of the model itself"),
], ids=str)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(
    tiny_model: Path, given: dict[str, Any], said: str
) -> None:
    if "served_name" in given:
        given = {**given, "served_model_name": given["served_name"]}
        del given["served_name"]
    with pytest.raises(ConfigError) as raised:
        engine_config(tiny_model, given)
    assert said in str(raised.value)


def test_no_name_of_the_model_is_an_adapter(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    name = tiny_model.name
    for model in (tiny_model, f"./{name}", name):
        for given in (name, str(tiny_model), f"./{name}", f"{tiny_model}/", f"x/../{name}"):
            with pytest.raises(ConfigError, match="the name of the model itself"):
                engine_config(model, {"lora_modules": {given: "/x"}})
        assert engine_config(model, {"lora_modules": {f"{name}2": "/x"}}).lora.num_slots


@pytest.mark.parametrize(("config", "num_slots"), [
    (LoraConfig(), 0), (LoraConfig(enabled=True), 4), (LoraConfig(modules=(A,), max_slots=2), 2),
    (LoraConfig(folder=Path("/x")), 4),
])  # fmt: skip
def test_slots_are_there_where_adapters_are_taken(config: LoraConfig, num_slots: int) -> None:
    assert EngineConfig(ModelConfig(Path("none"), "m"), lora=config).lora.num_slots == num_slots


def test_what_config_shows_can_be_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--lora-modules", f'[{{"name": "a", "path": "{tmp_path}/a b"}}, "b=./c"]',
             "--max-loras", "2", "--lora-dir", str(tmp_path)]  # fmt: skip
    assert main(["config", "show", *words]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(shown)
    assert main(["config", "show", "--config", str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == shown
    assert main(["config", "show", "--json", *words]) == 0
    values = json.loads(capsys.readouterr().out)
    assert lora_modules(CALLED, values["lora_modules"]) == (
        LoraModule("a", tmp_path / "a b"), LoraModule("b", Path("c")),
    )  # fmt: skip
    assert (values["max_loras"], values["lora_dir"]) == (2, str(tmp_path))
