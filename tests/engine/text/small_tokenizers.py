# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of every kind that models have, and words that are hard on them."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from stratakv.engine.text.tokenizer import Tokenizer

# Also letters of several code points (joined emoji, flags, combining marks), one word each.
WORDS = [
    "Zwölf", "Boxkämpfer", "jagen", "Виктор", "quer", "über", "漢字の道", "🙂🙃", "the", "naïve",
    "café,", "123", "times.", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪🇯🇵", "❤\ufe0f",
    "e\u0301a\u0323\u0308", "नमस्ते", "สวัสดี", "한국어", "\u1112\u1161\u11ab", "x\u200dy", "\n\tz",
]  # fmt: skip
TEXT = " ".join(WORDS) + " "


def byte_level() -> Tokenizer:
    """Bytes and a few merges; one character may take four tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([TEXT], trainer)
    return Tokenizer(fast)


def byte_fallback() -> Tokenizer:
    """Words with a mark for the space before them, and bytes for what is unknown."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ["▁", "▁a", "▁b", "a", "b", "é", "▁é"]:
        vocabulary[piece] = len(vocabulary)
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    fast.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(fast)


def metaspace(scheme: str, *, fallback: bool = False) -> Tokenizer:
    """Unigrams in which the space belongs to the word; without bytes what is unknown is lost."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -2.5), ("a", -3.0), ("é", -3.0), ("漢字", -3.0)]
    byte_pieces = [(f"<0x{byte:02X}>", -6.0) for byte in range(256)]
    letters = sorted(set(TEXT) - {" ", "a", "é"})
    pieces += byte_pieces if fallback else [(letter, -4.0) for letter in letters]
    fast = FastTokenizer(models.Unigram(pieces, 0, byte_fallback=fallback))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    fast.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return Tokenizer(fast)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, never": lambda: metaspace("never"),
    "metaspace and byte fallback": lambda: metaspace("always", fallback=True),
}
BYTE_FALLBACK = ("byte fallback", "metaspace and byte fallback")
