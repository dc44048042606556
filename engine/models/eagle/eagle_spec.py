# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of an EAGLE head for a Llama model, in SafeAILab's or in vLLM's form.

A head has one or a few Llama layers, which read the hidden states of the model for which it drafts:

    embedding of a token ─┐
                          ├─► fc ─► layers ─► the model's own output matrix
    hidden state before ──┘

A head has the hidden size and the vocabulary of its model. An EAGLE-3 head raises an error that
names EAGLE-3: such a head reads hidden states of three layers and has its own vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ....tiers.settings.values import ConfigError
from ..checkpoint.files import check_directory, is_there
from ..checkpoint.foreign_directory import explain_no_config
from ..checkpoint.json_fields import JsonFields, read_json
from ..checkpoint.stored_tensors import StoredTensors
from ..checkpoint.tensor_shapes import FUSION, eagle_name
from ..model_source import ModelSource
from ..model_spec import ModelSpec
from ..spec.spec_parser import CONFIG, parse_model_spec

_LLAMA = "LlamaForCausalLM"
# Published heads often have the architecture name of a Llama model.
_ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "EAGLEModel")
_MODEL_TYPE = "eagle"
# Keys that occur only in the config.json of an EAGLE-3 head.
_OF_EAGLE3 = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
_OTHER_HEADS = "--speculative-method ngram or a draft model needs no head"


def is_eagle_head(path: Path) -> bool:
    """Whether the config.json under `path` describes an EAGLE head, EAGLE-3 included. The result is
    False if config.json cannot be read; the later loading raises the error."""
    try:
        config = read_json(path / CONFIG)
    except ConfigError:
        return False
    return _says_eagle(config) or _says_eagle3(config)


def load_eagle_spec(path: Path) -> ModelSpec:
    """Read the config.json of an EAGLE head. Raise ConfigError, with file and key, for a missing or
    unsupported value and for an EAGLE-3 head."""
    check_directory(path)
    if not is_there(path / CONFIG):
        raise ConfigError(explain_no_config(path))
    config = read_json(path / CONFIG)
    if _says_eagle3(config):
        raise ConfigError(
            f"{path} is an EAGLE-3 head, which reads hidden states of three layers; this version "
            f"computes EAGLE-1 heads, which read the last one: take such a head; {_OTHER_HEADS}"
        )
    values = dict(config.values)
    if _says_eagle(config):
        # vLLM's form has the shape of the layers in an inner object.
        inner = config.inner("model")
        values |= inner.values
        values |= {"architectures": [_LLAMA], "model_type": "llama"}
    elif config.values.get("architectures") != [_LLAMA]:
        expected = f"{', '.join(_ARCHITECTURES[:2])} or {_LLAMA} for an EAGLE head"
        raise config.fault("architectures", expected, config.values.get("architectures"))
    return replace(parse_model_spec(path, JsonFields(values, config.where)), is_eagle=True)


def check_head(model: ModelSource, head: ModelSource) -> None:
    """Raise ConfigError unless the head has the hidden size and the vocabulary of the model."""
    for name, what in (("hidden_size", "numbers of a hidden state"), ("vocab_size", "tokens")):
        own, other = (int(getattr(each.spec, name)) for each in (model, head))
        if own != other:
            raise ConfigError(
                f"the EAGLE head {head.path} is for a model of {other} {what} ({name}), and "
                f"{model.path} has {own}; take the head that was trained for this model"
            )


def check_fusion(path: Path) -> None:
    """Raise ConfigError if the weights under `path` have no matrix `fc`, or the `fc` of an EAGLE-3
    head."""
    with StoredTensors(path, eagle_name) as stored:
        shape = stored.shape_of(FUSION)
    if shape is None:
        raise ConfigError(
            f"{path} lacks the tensor '{FUSION}', so it is no EAGLE head; take one, or give "
            "--speculative-method draft_model for a whole model"
        )
    rows, *columns = shape
    if columns == [3 * rows]:
        raise ConfigError(
            f"{path} is an EAGLE-3 head: its '{FUSION}' of {list(shape)} reads hidden "
            f"states of three layers, and that of EAGLE-1 has {2 * rows} columns; take such a "
            f"head; {_OTHER_HEADS}"
        )


def _says_eagle(config: JsonFields) -> bool:
    names = config.values.get("architectures")
    is_named = isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES
    return is_named or config.values.get("model_type") == _MODEL_TYPE


def _says_eagle3(config: JsonFields) -> bool:
    names = config.values.get("architectures")
    said = [*(names if isinstance(names, list) else ()), config.values.get("model_type")]
    is_named = any(isinstance(name, str) and "eagle3" in name.lower() for name in said)
    return is_named or any(config.has(name) for name in _OF_EAGLE3)
