# SPDX-License-Identifier: Apache-2.0
"""Logits processors of other packages, found by entry point and by name, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling.processor_loading import (
    InvalidProcessorParams,
    load_processors,
    make_params_check,
)
from stratakv.tiers.settings.values import ConfigError

from ...processor_package import install, packages_in
from .other_processors import Halve

GOOD = """
from stratakv.engine.sampling.processors.base import LogitsProcessor, StatefulProcessor
class Good(StatefulProcessor):
    @classmethod
    def validate_params(cls, params):
        args = params.extra_args or {}
        if "good" in args and not isinstance(args["good"], int):
            raise ValueError(f"good must be a whole number, got {args['good']!r}")
        args.get("needs") and args["missing"]
    def _state_of(self, added):
        return (added.params.extra_args or {}).get("good")
    def apply(self, logits, rows, offsets=None, drafts=None):
        return logits
class Outer:
    class Inner(Good):
        pass
class Partly(LogitsProcessor):
    pass
class Other:
    pass
value = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on the path."""
    (tmp_path / "strata_good.py").write_text(GOOD)
    with packages_in(tmp_path):
        yield tmp_path


def test_nothing_is_installed_and_nothing_is_asked_for():
    assert load_processors() == []


def test_installed_ones_come_first_and_each_class_once(folder):
    install(folder, "strata_one", zeta="strata_good:Good", alpha="strata_good:Outer.Inner")
    loaded = load_processors(["strata_good:Good"])
    assert [(one.name, one.kind.__qualname__) for one in loaded] == [
        ("alpha", "Outer.Inner"), ("zeta", "Good"),
    ]  # fmt: skip
    assert [one.name for one in load_processors(["strata_good:Outer.Inner"])] == ["alpha", "zeta"]


def test_two_packages_with_one_name_are_refused(folder):
    install(folder, "strata_one", same="strata_good:Good")
    install(folder, "strata_two", same="strata_good:Outer.Inner")
    with pytest.raises(ConfigError, match="several packages bring the logits processor same"):
        load_processors()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "strata_nowhere:Good",
            "No module named 'strata_nowhere'; install its package, or put its",
        ),
        ("strata_good:Bad", "cannot be loaded: strata_good has no Bad"),
        ("strata_good:Outer.Bad", "strata_good has no Outer.Bad"),
        ("strata_good:Other", "is of the type object; expected a subclass of LogitsProcessor"),
        ("strata_good:value", "is a int; expected a subclass"),
        ("strata_good:Partly", "does not define apply, is_active, is_argmax_invariant, update_st"),
        ("__main__:Strange", "the script of another process; move the class to a module"),
    ],
)
def test_what_is_no_processor_is_refused_by_name(name, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_processors([name])
    assert f"the logits processor {name}" in str(raised.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("def f(:", "raised SyntaxError"),
        ("import strata_no_dependency", "No module named 'strata_no_dependency'; install its"),
    ],
)
def test_an_import_that_fails_is_told_with_its_reason(folder, code, words):
    (folder / "strata_bad.py").write_text(code + "\n")
    install(folder, "strata_one", bad="strata_bad:Bad")
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_processors()
    assert "the logits processor bad (strata_bad:Bad) cannot be loaded" in str(raised.value)


@pytest.mark.parametrize(
    "code",
    [
        "import torch; table = torch.zeros(4, device='cuda')",
        "import torch; torch.zeros(4).cuda()",
        "import torch\ntry:\n    torch.cuda.init()\nexcept Exception:\n    pass",
    ],
)
@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a device is in use already")
def test_an_import_that_uses_a_device_is_refused(folder, code):
    (folder / "strata_device.py").write_text(f"{code}\nfrom strata_good import Good\n")
    begin = torch.cuda._lazy_init
    with pytest.raises(ConfigError, match="strata_device:Good uses a CUDA device while it is imp"):
        load_processors(["strata_device:Good"])
    assert torch.cuda._lazy_init is begin and not torch.cuda.is_initialized()


# The check of each request


def params(**args: object) -> SamplingParams:
    return SamplingParams(extra_args=args)


def test_the_processor_that_refuses_is_named():
    check = make_params_check(["strata_good:Good"])
    check(params(good=5, unknown="fine"))
    check(SamplingParams())
    with pytest.raises(InvalidProcessorParams) as raised:
        check(params(good="five"))
    told = "logits processor strata_good:Good: good must be a whole number, got 'five'"
    assert str(raised.value) == told
    with pytest.raises(InvalidProcessorParams, match="strata_good:Good: KeyError: 'missing'"):
        check(params(needs=True))


def test_arguments_that_nobody_reads_are_refused():
    check = make_params_check()
    check(SamplingParams(extra_args={}))
    with pytest.raises(InvalidProcessorParams, match="start the engine with --logits-processors"):
        check(params(good=5))


# The option


def read(value: object) -> tuple[str, ...]:
    return engine_config(None, {"logits_processors": value}).logits_processors


def test_names_and_classes_are_taken_in_every_form():
    name = f"{Halve.__module__}:Halve"
    assert read(Halve) == read([Halve]) == read(name) == read([name]) == (name,)
    assert read("a.b:C, d:E.F") == read(["a.b:C", "d:E.F"]) == read('["a.b:C","d:E.F"]')
    assert read(None) == read([]) == read("") == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a.b.C", "takes module:Class, such as mypackage.processors:NoRepeat, not 'a.b.C'"),
        ("a:b:C", "not 'a:b:C'"),
        ("a:", "not 'a:'"),
        ("../a:C", "not '../a:C'"),
        (5, "takes module:Class or classes, not 5"),
        ([5], "takes module:Class or classes, not 5"),
        ([type("Local", (Halve,), {})], "define the class at the top of a module"),
    ],
)
def test_what_names_no_class_is_refused(value, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(value)
