# SPDX-License-Identifier: Apache-2.0
"""Multipliers: constant factors at many places of a layer (Falcon-H1), from config.json.

    attention   out * o_proj(attention of q, key * k and v of the rows times in)
    state       out * out_proj(mixer of the rows times in, with a factor for each of its five parts)
    MLP         down * down_proj(silu(gate * gate_proj(row)) * up_proj(row))

Each factor is applied where no matrix has to be rounded, mostly without another pass over the rows.
A factor of a matrix's input is applied to the output instead, and a bias in between is divided by
the factor. The factor of keys is applied to the attention scores. The gate's factor is applied to
the weights of the norm before the MLP, which become float32 or wider; so this factor multiplies the
output of `up_proj` too. The factor that remains for the MLP is `residual`: hidden states (see
`ModelSpec.embedding_scale`) and the mixers' outputs are divided by `residual`."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.json_fields import JsonFields

LEAST, MOST = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The factors of config.json as fields, and the factors that the layers apply as properties."""

    embedding: float = 1.0
    logits: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    state_in: float = 1.0
    state_out: float = 1.0
    # Factors of a state mixer's gate, x, B, C and time steps.
    state_parts: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0

    @property
    def scores(self) -> float:
        """Factor of attention scores; `attention_in` multiplies the inputs of queries and of
        keys."""
        return self.key * self.attention_in**2

    @property
    def residual(self) -> float:
        """Factor of an MLP's output, without `gate`, which already multiplies the MLP's input."""
        return self.down / self.gate

    @property
    def attended(self) -> float:
        """Factor of an attention's result before its matrix, including the values' factor."""
        return self.attention_in * self.attention_out_bias

    @property
    def attention_out_bias(self) -> float:
        """Factor of the bias of an attention's output matrix, divided by `residual`."""
        return self.attention_out / self.residual

    @property
    def state_output(self) -> float:
        """Factor of a state mixer's output, and of its output matrix's bias."""
        return self.state_out / self.residual

    @property
    def state_inputs(self) -> tuple[float, ...]:
        """Factors of a state mixer's gate, x, B, C and time steps."""
        return tuple(self.state_in * part for part in self.state_parts)


def parse_multipliers(config: JsonFields) -> Multipliers:
    """Read all factors; an absent key gives 1. Raises ConfigError with the unusable key."""

    def one(name: str) -> float:
        return config.number_from(name, LEAST, MOST) if config.has(name) else 1.0

    gate, down = _several(config, "mlp_multipliers", 2)
    return Multipliers(
        embedding=one("embedding_multiplier"),
        logits=one("lm_head_multiplier"),
        attention_in=one("attention_in_multiplier"),
        attention_out=one("attention_out_multiplier"),
        key=one("key_multiplier"),
        state_in=one("ssm_in_multiplier"),
        state_out=one("ssm_out_multiplier"),
        state_parts=_several(config, "ssm_multipliers", 5),
        gate=gate,
        down=down,
    )


def _several(config: JsonFields, name: str, count: int) -> tuple[float, ...]:
    if not config.has(name):
        return (1.0,) * count
    values = config.numbers(name, count)
    if not all(LEAST <= value <= MOST for value in values):
        raise config.fault(name, f"{count} numbers from {LEAST:g} to {MOST:g}", config.values[name])
    return values
