# SPDX-License-Identifier: Apache-2.0
"""Request: one of vLLM's, as far as a connector looks, with the notes of the tests' scheduler."""

from __future__ import annotations

import hashlib
import types
from typing import Any

from .fake_pool import BLOCK, Block


class Request:
    """One of vLLM's, as far as a connector looks."""

    def __init__(
        self,
        name: str,
        tokens: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        hash_tokens: int = BLOCK,
    ) -> None:
        self.request_id = name
        self.num_prompt_tokens = len(tokens)
        self._hash_tokens = hash_tokens
        self.all_token_ids = list(tokens)
        self.max_tokens = len(tokens) + max_tokens
        self.kv_transfer_params = params
        self.lora_request: Any = None
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.tables: list[list[Block]] = []  # a list of blocks for each cache group
        self.num_cached: dict[int, int] = {}  # blocks, by group
        self.is_loading = False
        self.is_finished = False
        self.num_external = 0  # tokens that came from outside, in all
        self.answer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        known = types.SimpleNamespace(
            all_token_ids=self.all_token_ids, lora_request=self.lora_request, block_hashes=[]
        )
        return self._block_hasher(known)

    def _block_hasher(self, view: Any) -> list[bytes]:
        """The hashes that a view of the request does not have yet, with its adapter's name."""
        lora, size = view.lora_request, self._hash_tokens
        extra = f"{lora.lora_name} {lora.lora_path}".encode() if lora is not None else b""
        hashes, parent = [], view.block_hashes[-1] if view.block_hashes else b"root"
        tokens = view.all_token_ids
        for start in range(len(view.block_hashes) * size, len(tokens) - size + 1, size):
            parent = hashlib.sha256(parent + bytes(tokens[start : start + size]) + extra).digest()
            hashes.append(parent)
        return hashes
