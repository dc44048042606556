# SPDX-License-Identifier: Apache-2.0
"""Makes a ModelSpec from a Hugging Face directory's config.json.

Models that this project cannot compute as they were trained raise ConfigError with the key."""

from __future__ import annotations

from pathlib import Path

from ....tiers.settings.values import ConfigError
from ..checkpoint.files import check_directory, is_there
from ..checkpoint.foreign_directory import explain_no_config
from ..checkpoint.generation_config import GENERATION_CONFIG
from ..checkpoint.json_fields import JsonFields, read_json
from ..families import ARCHITECTURES, FAMILIES, Family, Norms
from ..model_spec import ModelSpec, Scales
from ..vision.vision_spec import parse_vision
from .expert_spec import EXPERT_KEYS, ExpertSpec, parse_experts
from .layer_parts import parse_layer_parts
from .layer_windows import parse_windows
from .multipliers import Multipliers, parse_multipliers
from .rope_spec import (
    GROWTH,
    PARTIAL,
    SECTIONS,
    RopeSpec,
    parse_axes,
    parse_query_growth,
    parse_rope,
    parse_two_ropes,
    turning_size,
)
from .state_layers import parse_states
from .text_parts import TEXT_PARTS

# Keys of a config.json that can change a model's numbers in unsupported ways, each with the values
# that have no effect; an absent or null key has none. Other values are refused with the name of the
# key, because the answers would be wrong.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    # Weights that are not plain matrices. Code in the directory (`auto_map`) is never run: a known
    # architecture is computed as transformers computes it without this code.
    "quantization_config": (),
    "compression_config": (),
    "pretraining_tp": (1,),
    # Other attention.
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "no_rope_layers": (),
    "query_pre_attn_scalar": (),
    "use_mrope": (False,),
    # Other scales.
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "scale_emb": (1, 1.0),
    # Layers that differ from each other, and mixtures of experts.
    **dict.fromkeys(EXPERT_KEYS, (0,)),
    "per_layer_config": (),
    # Parts that layers of other models have.
    "block_use_swiglu": (True,),
    "normalization_function": ("rmsnorm",),
    "use_pos_enc": (True,),
}


_QUANTISED = "quantised weights are not supported; take the model that they were made of"

CONFIG = "config.json"
MAX_EOS_IDS = 64
MAX_LAYERS = 4096
DEFAULT_ADJUSTED_SIZE, MAX_MULTIPLIER = 12288, 1000.0
# Number types of checkpoints in which models can be computed.
STORED_DTYPES = ("float64", "float32", "bfloat16", "float16")

# Top-level keys, beside the text part, that concern the whole model and cannot be ignored.
_OF_THE_WHOLE = ("quantization_config", "compression_config")
_IN_BOTH = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype")
_TIED = "tie_word_embeddings"

# Names of an architecture in early exports.
_SPELT = {"LLaMAForCausalLM": "LlamaForCausalLM"}


def load_model_spec(path: Path) -> ModelSpec:
    """Read the ModelSpec from config.json and, if it exists, generation_config.json.

    Raises ConfigError, with file and key, for missing and unsupported values."""
    check_directory(path)
    if not is_there(path / CONFIG):
        raise ConfigError(explain_no_config(path))
    return parse_model_spec(path, read_json(path / CONFIG))


def parse_model_spec(path: Path, whole: JsonFields) -> ModelSpec:
    """Make the `ModelSpec` of the model under `path` from `whole`, the fields of its config.json.
    Raises ConfigError like `load_model_spec`."""
    config = _text_part(whole)
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    refuse_unsupported(config, family)

    hidden_size = config.integer("hidden_size")
    parts = parse_layer_parts(config) if family.norms is Norms.SINGLE else None
    count = "num_hidden_layers"
    num_layers = config.integer(count, maximum=MAX_LAYERS) if parts is None else parts.num_layers
    num_heads = _integer(config, "num_attention_heads", family.default_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    max_positions = _max_positions(config, family)
    vocab_size = _integer(config, "vocab_size", family.default_vocab_size)
    eos, bos = _special_ids(path, config, vocab_size)
    windows = parse_windows(config, family, num_layers)
    rope, local_rope = _ropes(config, family, head_dim, max_positions)
    turning = head_dim
    if family.turns_partly:
        turning = turning_size(config, head_dim, family.default_turning)
    experts = None
    if family.experts is not None:
        experts = parse_experts(config, family.experts, num_layers)
    states = None
    if family.states is not None:
        listed = None if parts is None else parts.states
        states = parse_states(config, family.states, hidden_size, num_layers, listed)
    attention_layers = None if parts is None else parts.attention
    if family.states is not None and family.states.is_beside_attention:
        attention_layers = tuple(range(num_layers))
    multipliers = parse_multipliers(config) if family.multiplies else None
    if windows is None:
        local_rope = None
    vision = parse_vision(path, whole) if config is not whole else None
    axes = None
    if vision is not None and vision.kind != "tiles" and family.sections is not None:
        axes = parse_axes(config, family.sections, head_dim)
    if vision is not None and len(vision.deep_layers) >= num_layers:
        expected = f"fewer than the text's {num_layers} layers"
        raise whole.fault("vision_config: deepstack_visual_indexes", expected, vision.deep_layers)
    logits_softcap, score_softcap = _softcaps(config, family)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config, family, experts, num_layers),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, family, num_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=config.number(family.eps_key, family.default_eps),
        rope=rope,
        tied_embeddings=_is_tied(config, family),
        attention_bias=(
            config.boolean(family.bias_key, family.default_bias)
            if family.attention_bias is None
            else family.attention_bias
        ),
        mlp_bias=family.mlp_bias and config.boolean("mlp_bias", False),
        eos_token_ids=eos,
        bos_token_id=bos,
        sliding_window=windows and windows.window,
        stored_dtype=_stored_dtype(config),
        sliding_layers=windows and windows.layers,
        local_rope=local_rope,
        query_scalar=_query_scalar(config, family),
        logits_softcap=logits_softcap,
        is_text_part=config is not whole,
        vision=vision,
        rope_axes=axes,
        experts=experts,
        scales=_scales(config, family, multipliers, head_dim),
        score_softcap=score_softcap,
        still_layers=_still_layers(config, family, num_layers),
        query_growth=parse_query_growth(config, rope) if family.grows_queries else None,
        turning_dim=None if turning == head_dim else turning,
        state=states,
        attention_layers=attention_layers,
        mlp_layers=None if parts is None else parts.mlps,
        multipliers=multipliers,
    )


def refuse_unsupported(config: JsonFields, family: Family) -> None:
    """Raise ConfigError for the first key of config.json with an unsupported value. Keys that the
    family's code reads are skipped."""
    heeded = _heeded_keys(family)
    known = _NEUTRAL | {
        family.activation_key: family.activation.value,
        "attn_output_gate": (family.gates_attention,),
    }
    if family.fixes_turning:
        known[PARTIAL] = (family.default_turning,)
    for name, neutral in known.items():
        if name not in heeded and config.has(name) and config.values[name] not in neutral:
            expected = " or ".join(repr(value) for value in neutral) or "absent"
            if name in EXPERT_KEYS:
                expected = "absent or 0"
            why = _QUANTISED if name == "quantization_config" else "anything else is not supported"
            raise config.fault(name, f"{expected} ({why})", config.values[name])


def _heeded_keys(family: Family) -> set[str]:
    """Return the keys of `_NEUTRAL` that the family's code reads."""
    heeded = set()
    if family.query_scalar is not None:
        heeded.add("query_pre_attn_scalar")
    if family.softcaps_logits:
        heeded.add("final_logit_softcapping")
    if family.default_softcaps is not None:
        heeded.add("attn_logit_softcapping")
    if family.is_scaled:
        heeded |= {
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        }
    if family.multiplies:
        heeded.add("embedding_multiplier")
    if family.no_rope_interval is not None:
        heeded.add("no_rope_layers")
    if family.experts is not None:
        heeded |= {"num_experts", "num_local_experts"}
    if family.norms is Norms.SINGLE:  # its list of layers decides about experts
        heeded |= set(EXPERT_KEYS)
    return heeded


def _text_part(whole: JsonFields) -> JsonFields:
    """Return the fields of the text part if the model is multimodal, else all fields. Raises
    ConfigError if the text part is missing, or if a top-level key has an unsupported value."""
    kind, names = whole.values.get("model_type"), whole.values.get("architectures")
    for name, part in TEXT_PARTS.items():
        if names == [name] or (not names and kind == part.model_type):
            break
    else:
        return whole
    if whole.text("model_type", part.model_type) != part.model_type:
        raise whole.fault("model_type", f"{part.model_type} for this architecture", kind)
    for field in _OF_THE_WHOLE:
        if whole.has(field):
            raise whole.fault(field, "absent (anything else is not supported)", whole.values[field])
    if part.may_be_flat and not whole.has("text_config"):
        kinds = {"model_type": FAMILIES[part.architectures[0]].model_type}
        named = {"architectures": list(part.architectures)}
        return JsonFields(dict(whole.values) | kinds | named, whole.where)
    if not whole.has("text_config"):
        raise whole.fault("text_config", "an object, as this model has parts beside text", None)
    inner = whole.inner("text_config")
    values = {name: value for name, value in inner.values.items() if name != _TIED}
    # Outer fields override the end tokens and decide whether the head is tied.
    values |= {field: whole.values[field] for field in (*_IN_BOTH, _TIED) if whole.has(field)}
    kind = inner.values.get("model_type")
    of_kind = [name for name in part.architectures if FAMILIES[name].model_type == kind]
    return JsonFields(
        values | {"architectures": (of_kind or list(part.architectures))[:1]}, inner.where
    )


def _architecture(config: JsonFields) -> str:
    """Return the model's key in FAMILIES, by the architecture's name or else by model_type."""
    kind = config.values.get("model_type")
    known = "this version serves " + ", ".join((*ARCHITECTURES, *TEXT_PARTS))
    names = config.values.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == kind
    ]
    if isinstance(names, list):
        names = [_SPELT.get(name, name) if isinstance(name, str) else name for name in names]
    if not names and kind is not None:
        raise config.fault("model_type", f"that of a supported family ({known})", kind)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise config.fault("architectures", f"one supported name ({known})", names)
    expected = FAMILIES[names[0]].model_type
    if config.text("model_type", expected) != expected:
        raise config.fault("model_type", f"{expected} for this architecture", kind)
    return str(names[0])


def _stored_dtype(config: JsonFields) -> str | None:
    value = next((config.values[n] for n in ("dtype", "torch_dtype") if config.has(n)), None)
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    return name if name in STORED_DTYPES else None


def _num_kv_heads(config: JsonFields, family: Family, num_heads: int) -> int:
    name = "num_key_value_heads"
    # A null differs from an absent key here: it means the number of heads.
    default = None if name in config.values else family.default_kv_heads
    count = config.integer(name, default or num_heads)
    if num_heads % count:
        raise config.fault(name, f"a divisor of num_attention_heads ({num_heads})", count)
    return count


def _integer(config: JsonFields, name: str, default: int | None) -> int:
    """Read a whole number. If `default` is None, config.json must have the key."""
    return config.integer(name) if default is None else config.integer(name, default)


def _ropes(
    config: JsonFields, family: Family, head_dim: int, max_positions: int
) -> tuple[RopeSpec, RopeSpec | None]:
    """Read the rotary positions of layers with full attention and, in families with two kinds of
    positions, those of layers with a window."""
    if family.never_turns:
        return RopeSpec(), None
    if family.default_thetas is not None:
        return parse_two_ropes(config, head_dim, max_positions, family.default_thetas)
    heeded = {PARTIAL} if family.turns_partly else set()
    if family.sections is not None:
        heeded.add(SECTIONS)
    if family.grows_queries:
        heeded.add(GROWTH)
        if not any(config.has(name) for name in ("rope_parameters", "rope_scaling")):
            raise config.fault("rope_parameters", "an object, for this family has yarn", None)
    theta, turning = family.default_theta, family.default_turning
    return parse_rope(config, head_dim, max_positions, theta, heeded, turning), None


def _query_scalar(config: JsonFields, family: Family) -> float | None:
    if family.query_scalar is None:
        return None
    return config.number("query_pre_attn_scalar", family.query_scalar)


def _softcaps(config: JsonFields, family: Family) -> tuple[float | None, float | None]:
    """Read the softcaps of logits and of attention scores; None for an absent cap."""
    if not family.softcaps_logits:
        return None, None
    names, given = ("final_logit_softcapping", "attn_logit_softcapping"), family.default_softcaps
    if given is None:
        return config.optional_number(names[0]), None
    logits, scores = (
        config.optional_number(name) if name in config.values else default
        for name, default in zip(names, given, strict=True)
    )
    return logits, scores


def _scales(
    config: JsonFields, family: Family, multipliers: Multipliers | None, head_dim: int
) -> Scales | None:
    if multipliers is not None:
        return Scales(
            embedding=multipliers.embedding,
            attention=multipliers.scores * head_dim**-0.5,
            residual=multipliers.residual,
            logits=1.0 / multipliers.logits,
        )
    if not family.is_scaled:
        return None
    return Scales(
        embedding=config.number("embedding_multiplier", 1.0),
        attention=config.number("attention_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        logits=config.number("logits_scaling", 1.0),
    )


def _still_layers(config: JsonFields, family: Family, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers without rotary positions, or None if all layers have them. By the family
    these are all layers, those with a 0 in `no_rope_layers`, or each n-th layer."""
    if family.never_turns:
        return tuple(range(num_layers))
    if family.is_still:
        key = "position_embedding_type"
        kind = config.text(key, "nope")
        if kind not in ("nope", "rope"):
            raise config.fault(key, "'rope', 'nope' or absent", kind)
        return tuple(range(num_layers)) if kind == "nope" else None
    if family.no_rope_interval is None:
        return None
    given = config.values.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", family.no_rope_interval)
        given = [int((layer + 1) % interval > 0) for layer in range(num_layers)]
    turns = given if isinstance(given, list) else []
    if len(turns) != num_layers or any(turn not in (0, 1) for turn in turns):
        expected = f"a list of 0 or 1 for each of the {num_layers} layers"
        raise config.fault("no_rope_layers", expected, given)
    still = tuple(layer for layer, turn in enumerate(turns) if not turn)
    return still or None


def _intermediate_size(
    config: JsonFields, family: Family, experts: ExpertSpec | None, num_layers: int
) -> int:
    """Read the size of an MLP: the number of rows of its gate matrix."""
    if not family.adjusts_mlp:
        default = family.default_mlp_size or _unused_size(experts, num_layers)
        return _integer(config, family.mlp_size_key, default)
    key = "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size"
    size = config.integer(key, DEFAULT_ADJUSTED_SIZE)
    if not config.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if not config.has("block_ffn_dim_multiplier") and ("block_ffn_dim_multiplier" in config.values):
        return size
    size = int(config.number("block_ffn_dim_multiplier", 1.0, at_most=MAX_MULTIPLIER) * size)
    multiple = config.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _is_tied(config: JsonFields, family: Family) -> bool:
    # An older spelling wins, as in transformers.
    key = _TIED
    if family.adjusts_mlp and config.has("tie_embedding"):
        key = "tie_embedding"
    return config.boolean(key, family.default_tied)


def _unused_size(experts: ExpertSpec | None, num_layers: int) -> int | None:
    """Return a default for `intermediate_size`, which is unused if every layer has experts."""
    return experts.size if experts is not None and len(experts.layers) == num_layers else None


def _max_positions(config: JsonFields, family: Family) -> int:
    name = "max_position_embeddings"
    if family.default_max_positions is None:
        return config.integer(name, minimum=2)
    return config.integer(name, family.default_max_positions, minimum=2)


def _head_dim(config: JsonFields, family: Family, hidden_size: int, num_heads: int) -> int:
    default = family.default_head_dim
    if default is None and not config.has("head_dim") and hidden_size % num_heads:
        raise config.fault("hidden_size", f"a multiple of {num_heads} attention heads", hidden_size)
    head_dim = config.integer("head_dim", default or hidden_size // num_heads)
    if head_dim % 2:
        raise config.fault("head_dim", "even, because rotary positions turn pairs", head_dim)
    return head_dim


def _special_ids(
    path: Path, config: JsonFields, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """Read the ids of end and begin tokens. generation_config.json overrides config.json."""
    sources = [config]
    if is_there(path / GENERATION_CONFIG):
        sources.insert(0, read_json(path / GENERATION_CONFIG))
    eos = next((s for s in sources if s.has("eos_token_id")), None)
    # -1 is an older spelling of "none".
    bos = next((s for s in sources if s.has("bos_token_id")), None)
    if bos is not None and bos.values["bos_token_id"] == -1:
        bos = None
    return (
        () if eos is None else _eos_ids(eos, vocab_size),
        None if bos is None else bos.integer("bos_token_id", minimum=0, maximum=vocab_size - 1),
    )


def _eos_ids(source: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Read the end tokens, without -1 and ids beyond the vocabulary, which cannot be sampled."""
    value = source.values["eos_token_id"]
    given = value if isinstance(value, list) else [value]
    ids = [each for each in given if type(each) is int]
    if len(ids) < len(given) or len(ids) > MAX_EOS_IDS:
        expected = f"a token id below {vocab_size}, or a list of at most {MAX_EOS_IDS} of them"
        raise source.fault("eos_token_id", expected, value)
    return tuple(dict.fromkeys(each for each in ids if 0 <= each < vocab_size))
