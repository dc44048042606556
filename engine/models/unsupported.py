# SPDX-License-Identifier: Apache-2.0
"""The keys of a config.json that would change a model's numbers in ways nothing here computes.

A model that has one is refused by the name of the key, rather than answered wrongly. Knows nothing
of what the other keys mean.
"""

from __future__ import annotations

from .checkpoint.json_fields import JsonFields

# Each key with the values under which it changes nothing. An absent or null key is always neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    # Weights that are not plain matrices, and code that comes with them.
    "quantization_config": (),
    "compression_config": (),
    "auto_map": (),
    "pretraining_tp": (1,),
    # Other attention.
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "is_causal": (True,),
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
    "hidden_act": ("silu", "swish"),
    "n_routed_experts": (),
    "num_experts": (),
    "num_local_experts": (),
    "per_layer_config": (),
}


def refuse_unsupported(config: JsonFields) -> None:
    """Raise ConfigError for the first key with a value that is not neutral."""
    for name, neutral in _NEUTRAL.items():
        if config.has(name) and config.values[name] not in neutral:
            expected = " or ".join(repr(value) for value in neutral) or "absent"
            raise config.fault(
                name, f"{expected} (anything else is not supported)", config.values[name]
            )
