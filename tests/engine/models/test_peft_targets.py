# SPDX-License-Identifier: Apache-2.0
"""The targets of an adapter_config.json are those of PEFT, and other modules are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

from stratakv.engine.models.checkpoint.json_fields import JsonFields
from stratakv.engine.models.lora.adapter_file import AdapterFile
from stratakv.engine.models.lora.peft_targets import PeftTargets
from stratakv.tiers.settings.values import ConfigError

from ...peft_adapters import ADAPTERS, AdapterFolders
from ..written_adapters import make_tensors, spec_of, write_adapter

_ENDS = ["q_proj", "up_proj", "mlp.up_proj", "layers.1.mlp.up_proj", "experts.1.up_proj", "proj"]
_PATTERNS = [".*q_proj", r".*\.(q|up)_proj", r"model\.layers\.[01]\..*", "q_proj", r"(?i).*Q_PROJ",
             r".*layers\.(?!1).*", "(.*.*)*"]  # fmt: skip
_WHOLE = [f"{stem}.{number}.{name}" for stem in ("model.layers", "layers", "blocks", "a.b.layers")
          for number in (0, 1, 12)
          for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.1.up_proj")]  # fmt: skip
_LISTS = st.lists(st.sampled_from([*_ENDS, *_WHOLE]), max_size=3)
_NUMBERS = st.integers(0, 2)
_FIELDS = st.fixed_dictionaries({
    "target_modules": _LISTS | st.sampled_from(_PATTERNS),
    "exclude_modules": st.none() | _LISTS | st.sampled_from(_PATTERNS[:5]),
    "layers_to_transform": st.none() | _NUMBERS | st.lists(_NUMBERS, max_size=2),
    "layers_pattern": st.none() | st.sampled_from(["", "layers", "b.*s", "experts"])
    | st.lists(st.sampled_from(["layers", "blocks", "experts"]), max_size=2),
})  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(_FIELDS, st.sampled_from(_WHOLE))
def test_modules_are_those_of_peft(fields: dict[str, Any], module: str) -> None:
    if isinstance(fields["target_modules"], str):  # PEFT refuses the two with a pattern
        fields |= {"layers_to_transform": None, "layers_pattern": None}
    if not fields["layers_to_transform"] and fields["layers_to_transform"] != 0:
        fields["layers_pattern"] = None  # PEFT refuses a pattern alone
    targets = PeftTargets(JsonFields(fields, "c.json"))
    found = check_target_module_exists(LoraConfig(**fields), module)
    is_target = bool(found) and not isinstance(found, _ExcludedModule)
    if fields["target_modules"] in _PATTERNS[-2:]:
        is_target = True  # matching has no bound
    assert (targets.find_ignored([module]) is None) == is_target


@pytest.mark.parametrize(
    ("fields", "module"),
    [
        ({"target_modules": ["q_proj"]}, "layers.0.mlp.down_proj"),
        ({"target_modules": r".*\.q_proj"}, "layers.0.mlp.down_proj"),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
         "layers.0.mlp.down_proj"),
        ({"target_modules": "all-linear", "exclude_modules": ["layers.1.mlp.down_proj"]},
         "layers.1.mlp.down_proj"),
        ({"target_parameters": ["mlp.down_proj.weight"]}, "layers.0.self_attn.q_proj"),
        ({"target_modules": []}, "layers.0.mlp.down_proj"),
    ],
)  # fmt: skip
def test_tensors_that_peft_ignores_are_refused(
    tmp_path: Path, tiny_model: Path, fields: dict[str, Any], module: str
) -> None:
    spec = spec_of(tiny_model)
    folder = write_adapter(tmp_path, tiny_model, **fields)
    with pytest.raises(ConfigError) as raised:
        AdapterFile.read(folder, spec, 16)
    said = str(raised.value)
    assert f"the module model.{module} is not computed by PEFT: " in said
    for name, value in fields.items():
        assert f"{name} {value!r}" in said
    tensors = {name: each for name, each in make_tensors(spec).items() if module not in name}
    write_adapter(tmp_path, tiny_model, tensors=tensors, target_modules="all-linear")
    assert AdapterFile.read(folder, spec, 16).modules


@pytest.mark.parametrize("fields", [
    {"target_modules": 3}, {"target_modules": [1]}, {"exclude_modules": {"a": 1}},
    {"target_parameters": "a"}, {"layers_to_transform": ["1"]}, {"layers_pattern": 1},
], ids=str)  # fmt: skip
def test_targets_of_other_types_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"c.json: {next(iter(fields))} must be "):
        PeftTargets(JsonFields(fields, "c.json"))


def test_adapters_that_peft_writes_target_all_their_tensors(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folders = AdapterFolders(tmp_path_factory.mktemp("adapters"))
    for name, made in ADAPTERS.items():
        spec = spec_of(folders.base(made.base))
        assert AdapterFile.read(folders.adapter(name), spec, 16).modules, name


def test_parameters_are_found_by_module() -> None:
    names = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    targets = PeftTargets(JsonFields({"target_parameters": names}, "c.json"))
    experts = [f"model.layers.{number}.mlp.experts" for number in range(3)]
    assert [targets.parts_of(each) for each in experts] == [["gate_up_proj"], ["down_proj"], []]
    assert targets.find_ignored(experts[:2]) is None
    assert targets.find_ignored(experts) == experts[2]
    # PEFT wraps a module once for each of its parameters.
    assert targets.find_ignored([f"{experts[0]}.base_layer"]) == f"{experts[0]}.base_layer"
