# SPDX-License-Identifier: Apache-2.0
"""EagleHead: the layers of an EAGLE head, between the embedding and the output matrix of its model.

    fuse      embedding of a token, hidden state of the previous token ──► [tokens, hidden]
    forward   the fused rows, given as `Embeds`, through the layers ──► hidden states
    logits    the model's own output matrix, over these hidden states
The head reads the model's last hidden state after the last norm, the input of `logits`, as heads in
vLLM do. The head has no norm after its layers, and no norm before the attention of its first layer.
The head uses the model's embedding and output matrix, which are in memory once. Copies of these two
matrices in the checkpoint of a head, which training did not change, are not read."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ..checkpoint.checkpoint import CPU
from ..checkpoint.weights import EagleWeights, load_eagle_weights
from ..decoder import PLAIN, Decoder
from ..layer import take_layers
from ..layers import Elementwise, Linear
from ..model_source import ModelSource
from ..model_spec import ModelSpec
from ..rope import turns_of
from .eagle_spec import check_fusion


class EagleHead(Decoder):
    """An EAGLE head in memory; it uses the embedding and the output matrix of its model. The
    constructor empties `weights.layers`, as the constructor of `Decoder` does."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: EagleWeights,
        model: Decoder,
        max_model_len: int,
        dtype: torch.dtype,
        elementwise: Elementwise = PLAIN,
    ) -> None:
        self.spec = spec
        self._ops = elementwise
        self._element_bytes = weights.fusion.element_size()
        device = weights.fusion.device
        self._fusion = Linear(weights.fusion, weights.fusion_bias)
        self._layers = take_layers(spec, weights.layers, elementwise)
        self._last_norm = None
        self._embedding, self._embedding_scale = model._embedding, model._embedding_scale
        self._head, self._logits_softcap = model._head, model._logits_softcap
        self._logits_divisor = model._logits_divisor
        self._tables = turns_of(spec, max_model_len, dtype, device)
        self._growth = self.chosen_experts = None
        self._table_of = spec.rope_of_layers

    @classmethod
    def load_head(
        cls,
        source: ModelSource,
        model: Decoder,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        elementwise: Elementwise = PLAIN,
        *,
        is_random: bool = False,
    ) -> Self:
        """Read the weights of a head directly to `device`, or make random weights. Raise
        ConfigError if the weights do not fit the head's specification."""
        if not is_random:
            check_fusion(source.path)
        weights = load_eagle_weights(
            source.path,
            source.spec,
            dtype,
            device,
            joins_gate=elementwise.is_kernels,
            is_random=is_random,
        )
        return cls(source.spec, weights, model, max_model_len, dtype, elementwise)

    def fuse(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Compute the input of the layers, `[tokens, hidden]`, from each token's embedding and the
        hidden state `[tokens, hidden]` of the previous token."""
        return self._fusion(torch.cat((self.embed(token_ids), hidden), -1))
