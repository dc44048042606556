# SPDX-License-Identifier: Apache-2.0
"""The identity of a node (`GET /node`), and the check that two nodes can serve the same clients.

A field is compared only if both nodes report it, so newer nodes may report additional fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ...tiers.settings.format import format_value

Identity = Mapping[str, str]

_OBJECT = "stratakv.node"  # the `object` field of an answer of StrataKV to GET /node
# Fields that determine a node's answers, in the order of comparison; each with its flag or file.
_OF_ANSWERS = {
    "model": "--served-model-name",
    "fingerprint": "the model's config.json and weights",
    "revision": "--revision",
    "generation_config": "the model's generation_config.json and --generation-config",
    "tokenizer": "the model's tokenizer.json",
    "chat_template": "the model's chat template",
}
# Fields of KV blocks: nodes that differ in one of these fields answer alike but share no blocks.
_OF_BLOCKS = {
    "kv_dtype": "--dtype and --kv-cache-dtype",
    "dtype": "--dtype",
    "root_version": "the version of StrataKV",
    "epoch": "the weights that are loaded",
    "block_size": "--block-size",
    "layout_version": "the version of StrataKV",
    "layout": "the model's config.json",
    "cache_groups": "the version of StrataKV",
    "block_hash": "--block-hash",
    "tag_key": "--kv-offload-remote-tag-key-file",
    "tenant_secret": "--tenant-secret",
    "tenant_header": "--tenant-header",
}
_TOLD = (*_OF_ANSWERS, *_OF_BLOCKS, "role", "tiers")


class Difference(NamedTuple):
    """A field with different values on two nodes."""

    field: str
    value: str
    other: str
    source: str  # the flags or files that determine the field

    def explain(self, other_name: str) -> str:
        """Return a sentence that says why the node with `value` is not used, and the remedy."""
        return (
            f"its {self.field} is {format_value(self.value)} and that of {other_name} is "
            f"{format_value(self.other)}; it comes from {self.source}: have both the same, or put "
            "them behind routers of their own"
        )


def read_identity(body: bytes) -> Identity | None:
    """Return the identity in the body of a node's answer; None if other software has answered."""
    try:
        told = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if told.get("object") != _OBJECT:
        return None
    return {name: told[name] for name in _TOLD if isinstance(told.get(name), str)}


def find_difference(one: Identity, other: Identity, *, with_blocks: bool) -> Difference | None:
    """Return the first difference that forbids using two nodes together, or None. `with_blocks`:
    the nodes load each other's KV blocks, so the fields of blocks must match too."""
    return next(_differences(one, other, with_blocks), None)


def explain_role(identity: Identity, listed: str, other: str) -> str:
    """Return the reason why a node cannot have the role `listed`, and the remedy; "" if it can.
    `other` is the role under which the node is not listed."""
    if identity.get("role") != other:
        return ""
    return (
        f"it was started with --role {other} and is listed with --{listed}; list it with "
        f"--{other}, or start it with --role {listed}"
    )


def _differences(one: Identity, other: Identity, with_blocks: bool) -> Iterator[Difference]:
    for name, source in {**_OF_ANSWERS, **(_OF_BLOCKS if with_blocks else {})}.items():
        if name in one and name in other and one[name] != other[name]:
            yield Difference(name, one[name], other[name], source)
