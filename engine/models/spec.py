# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face directory says about its model: a frozen value object read from config.json.

Knows nothing of weights or tensors, and imports no torch. What this project cannot compute the
way the model was trained is refused here, by the name of the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...tiers.block import BlockLayout
from ..config import ConfigError
from .json_fields import JsonFields, read_json
from .rope_spec import RopeSpec, parse_rope, stable_length

ARCHITECTURES = ("LlamaForCausalLM",)
MAX_EOS_IDS = 64

# Keys that change the numbers in ways the layers here do not compute, and the values under which
# they change nothing. An absent or null key is always neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "auto_map": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "num_local_experts": (),
    "num_experts": (),
    "pretraining_tp": (1,),
    "hidden_act": ("silu", "swish"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a model. Counts are elements, lengths are tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens, whose K and V can be cached and shared."""
        return stable_length(self.rope, self.max_positions)

    def layout(self, block_size: int, kv_dtype: str) -> BlockLayout:
        """How one block of this model lies."""
        return BlockLayout(self.num_layers, block_size, self.num_kv_heads, self.head_dim, kv_dtype)


def load_model_spec(path: Path) -> ModelSpec:
    """Read config.json and, where there is one, generation_config.json of a model directory.

    Raises ConfigError, naming the file and the key, for anything missing or not supported.
    """
    if not path.is_dir():
        raise ConfigError(f"the model {path} is not a directory; give a Hugging Face directory")
    config = read_json(path / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config)

    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        expected = f"a divisor of num_attention_heads ({num_heads})"
        raise config.fault("num_key_value_heads", expected, num_kv_heads)
    head_dim = _head_dim(config, hidden_size, num_heads)
    max_positions = config.integer("max_position_embeddings", minimum=2)
    vocab_size = config.integer("vocab_size")
    eos, bos = _special_ids(path, config, vocab_size)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", maximum=4096),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=parse_rope(config, head_dim, max_positions),
        tied_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        eos_token_ids=eos,
        bos_token_id=bos,
    )


def resolve_max_model_len(spec: ModelSpec, wanted: int | None) -> int:
    """The context to serve: `wanted`, or all the model allows; raises ConfigError beyond that."""
    if wanted is None:
        return spec.max_context
    if wanted <= spec.max_context:
        return wanted
    reason = f"the model's max_position_embeddings is {spec.max_positions}"
    if spec.max_context < spec.max_positions:
        reason = (
            f"beyond {spec.max_context} tokens its longrope positions depend on the length of the "
            "whole sequence, so its blocks could not be shared"
        )
    raise ConfigError(
        f"--max-model-len {wanted} is too long because {reason}; use at most {spec.max_context}"
    )


def _architecture(config: JsonFields) -> str:
    known = "this version serves " + ", ".join(ARCHITECTURES)
    names = config.values.get("architectures") or (
        list(ARCHITECTURES) if config.values.get("model_type") == "llama" else []
    )
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise config.fault("architectures", f"one supported name ({known})", names)
    if config.text("model_type", "llama") != "llama":
        raise config.fault("model_type", "llama for this architecture", config.values["model_type"])
    return str(names[0])


def _refuse_unsupported(config: JsonFields) -> None:
    for name, neutral in _NEUTRAL.items():
        if config.has(name) and config.values[name] not in neutral:
            expected = " or ".join(repr(value) for value in neutral) or "absent"
            raise config.fault(
                name, f"{expected} (anything else is not supported)", config.values[name]
            )
    kinds = config.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise config.fault("layer_types", "full_attention for every layer", kinds)


def _head_dim(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.fault("hidden_size", f"a multiple of {num_heads} attention heads", hidden_size)
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.fault("head_dim", "even, because rotary positions turn pairs", head_dim)
    return head_dim


def _special_ids(
    path: Path, config: JsonFields, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """End and begin ids: generation_config.json knows them better than config.json."""
    sources = [config]
    if (path / "generation_config.json").exists():
        sources.insert(0, read_json(path / "generation_config.json"))
    eos = next((s for s in sources if s.has("eos_token_id")), None)
    bos = next((s for s in sources if s.has("bos_token_id")), None)
    return (
        () if eos is None else _eos_ids(eos, vocab_size),
        None if bos is None else bos.integer("bos_token_id", minimum=0, maximum=vocab_size - 1),
    )


def _eos_ids(source: JsonFields, vocab_size: int) -> tuple[int, ...]:
    value = source.values["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    good = [i for i in ids if type(i) is int and 0 <= i < vocab_size]
    if len(good) < len(ids) or len(ids) > MAX_EOS_IDS:
        expected = f"a token id below {vocab_size}, or a list of at most {MAX_EOS_IDS} of them"
        raise source.fault("eos_token_id", expected, value)
    return tuple(dict.fromkeys(good))
