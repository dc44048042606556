# SPDX-License-Identifier: Apache-2.0
"""Text and tokenizer of the embedded model: CPython's documentation and docstrings.

The module makes plain documents from a documentation tree (reStructuredText sources) and from the
docstrings of the running Python's standard library. The module holds out whole topics, makes short
question-and-answer chats from the docstrings, and trains the tokenizer.

Nothing is downloaded: the caller names the folder of the documentation. The RST is cleaned only
partly: tables and rare directives are not changed."""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
ROLES = ("user", "assistant", "system")
SPECIALS = (END, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set known = message['role'] in ['system', 'assistant'] %}"
    "{{ '<|' + (message['role'] if known else 'user') + '|>' }}"
    "{{ message['content'] ~ '<|endoftext|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Directives whose whole block is dropped, because it has no meaning in plain text.
DROPPED = re.compile(
    r"index|(py:)?(current)?module|(module|section)author|tabularcolumns|toctree|(literal)?include|"
    r"highlight|audit-event(-table)?|test(setup|cleanup)|contents|image|figure|program|"
    r"limited-api-list|miscnews|raw"
)
# Directives whose line is dropped, while the block below is kept.
FRAMES = re.compile(
    r"(code-block|sourcecode|doctest|test(code|output)|parsed-literal|only|(list-)?table|"
    r"glossary|epigraph|sidebar|productionlist)"
)
# Credits are dropped: a small language model learns nothing from names of authors.
CREDIT = re.compile(
    r"\s*\((?:Contributed|Patch|Written|Implemented|Suggested)\b[^()]*(?:\([^()]*\)[^()]*)*\)"
)
LABELS = {
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated since and removed in version",
    "seealso": "See also:",
    "note": "Note:",
    "warning": "Warning:",
    "important": "Important:",
    "caution": "Caution:",
    "impl-detail": "Implementation detail:",
    "availability": "Availability:",
}

# Folders of the standard library that contain tests, generated data or texts of other projects.
SKIPPED_PARTS = re.compile(
    r"tests?|idle_test|site-packages|pydoc_data|lib2to3|encodings|_vendor|config-.*"
)

# Pages of legal text and tables of contents, which are useless for training.
SKIPPED_PAGES = {"license", "copyright", "contents", "distributing/index", "installing/index"}

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "Be brief and exact.",
)
QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name} for?",
    "How would you describe {name}?",
    "Tell me about {name}.",
)


@dataclass(frozen=True)
class Document:
    """A text and its topic, which decides whether the text is held out."""

    name: str
    topic: str
    text: str


def clean_inline(text: str) -> str:
    """Return `text` with RST roles, links and emphasis replaced by their visible words."""
    text = CREDIT.sub("", text)
    text = re.sub(r":[a-z0-9:+-]+:`[!~]?([^`<]*?)\s*<[^`>]*>`", r"\1", text)
    text = re.sub(r":(func|meth|c:func|py:meth):`[!~]?([^`]*?)(\(\))?`", r"\2()", text)
    text = re.sub(r":(pep|rfc):`([^`]*)`", lambda m: f"{m[1].upper()} {m[2]}", text)
    text = re.sub(r":(issue|gh):`([^`]*)`", r"issue \2", text)
    text = re.sub(r":[a-z0-9:+-]+:`[!~]?([^`]*)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"`([^`\n]+)`__?\b", r"\1", text)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)
    text = re.sub(r"(?<![\w*(\[,.=])\*(\w[\w ,-]*?)\*(?![\w*])", r"\1", text)
    text = re.sub(r"\s?\[#[\w-]*\]_", "", text)
    return re.sub(r"\\([*_`<>| ])", r"\1", text)


def directive_line(indent: str, name: str, rest: str) -> str | None:
    """Return the plain line that replaces the line of a directive, or None for no line."""
    if name in LABELS:
        ending = ":" if name.startswith(("version", "deprec")) else ""
        return f"{indent}{LABELS[name]} {rest}{ending}".rstrip()
    if name == "rubric":
        return f"{indent}{rest}"
    if FRAMES.fullmatch(name):
        return None
    kind = name.split(":")[-1]
    return f"{indent}{kind} {rest}".rstrip()


def cleaned_lines(lines: list[str]) -> Iterator[str]:
    """Yield RST lines without dropped blocks, and with plain lines in place of directives."""
    dropping: int | None = None
    options = False
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if dropping is not None:
            if not line.strip() or len(indent) > dropping:
                continue
            dropping = None
        if options and re.match(r"\s+:[\w-]+:", line):
            continue
        options = False
        found = re.match(r"\s*\.\. ([\w:+-]+)::\s*(.*)$", line)
        if found and not DROPPED.fullmatch(found[1]):
            options = True
            plain = directive_line(indent, found[1], found[2])
            if plain is not None:
                yield plain
        elif found or re.match(r"\s*\.\.( _| \||$| [^\[])", line):
            dropping = len(indent)
        elif line.strip() != "::":
            footnote = re.sub(r"^(\s*)\.\. (\[[^\]]*\])", r"\1\2", line)
            yield re.sub(r"::$", ":", footnote)


def mark_headings(text: str) -> str:
    """Return `text` with `#` headings, which need fewer tokens, in place of underlined headings."""
    marks = {"=": "#", "*": "#", "#": "#", "-": "##"}

    def heading(found: re.Match[str]) -> str:
        return f"{marks.get(found[2][0], '###')} {found[1].strip()}\n"

    text = re.sub(r"^([=*#-])\1{4,}\n(?=\S.*\n\1{5,}$)", "", text, flags=re.M)
    text = re.sub(r"^(\S.*)\n([=*#\-~^\"'+])\2{3,}$", heading, text, flags=re.M)
    return re.sub(r"^-{4,}$\n?", "", text, flags=re.M)


def clean_rst(source: str) -> str:
    """Return the plain text of one RST file."""
    lines = source.replace("\r", "").expandtabs(8).split("\n")
    text = clean_inline(mark_headings("\n".join(cleaned_lines(lines))))
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def documentation(root: Path) -> Iterator[Document]:
    """Yield every RST source below `root`, cleaned, in a fixed order."""
    for path in sorted([*root.rglob("*.rst"), *root.rglob("*.rst.txt")]):
        name = path.relative_to(root).as_posix().split("_sources/")[-1].split(".rst")[0]
        # A module's manual page and docstrings have the same topic, and are held out together.
        folder, _, stem = name.partition("/")
        topic = re.split(r"[.-]", stem)[0] if folder == "library" else name
        text = clean_rst(path.read_text(encoding="utf-8", errors="ignore"))
        if len(text) > 200 and name not in SKIPPED_PAGES:
            yield Document(name, topic, text)


def signature(node: ast.AST) -> str:
    """The `def` or `class` line of a syntax node, without the body."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return f"def {node.name}({ast.unparse(node.args)}):"


def walk_docstrings(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, signature, docstring) of each public function or class with a
    docstring."""
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        name = f"{prefix}.{node.name}"
        text = ast.get_docstring(node)
        if text and not node.name.startswith("_"):
            yield name, signature(node), text.expandtabs(8)
        if isinstance(node, ast.ClassDef):
            yield from walk_docstrings(node.body, name)


def chats(module: str, entries: list[tuple[str, str, str]]) -> Iterator[Document]:
    """Yield short chats in the form of the chat template, with one question or two each."""
    turns: list[str] = []
    dice = random.Random(module)
    for name, _, text in entries:
        answer = " ".join(text.split("\n\n")[0].split())
        if not 40 <= len(answer) <= 600:
            continue
        question = dice.choice(QUESTIONS).format(name=name)
        turns.append(f"<|user|>{question}{END}<|assistant|>{answer}")
        if len(turns) == 1 and dice.random() < 0.3:
            continue
        opening = f"<|system|>{dice.choice(SYSTEM_TEXTS)}{END}" if dice.random() < 0.3 else ""
        yield Document(f"chat:{name}", module.split(".")[0], opening + END.join(turns))
        turns = []


def standard_library() -> Iterator[Document]:
    """Yield the docstrings of each standard-library module as a document, and chats about them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(SKIPPED_PARTS.fullmatch(part) for part in relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        entries = list(walk_docstrings(tree.body, module))
        parts = [f"# Module {module}", (ast.get_docstring(tree) or "").expandtabs(8)]
        parts += [f"{line}\n    " + text.replace("\n", "\n    ") for _, line, text in entries]
        text = re.sub(r"[ \t]+$", "", "\n\n".join(p for p in parts if p), flags=re.M)
        if len(text) > 200:
            yield Document(f"docstrings:{module}", module.split(".")[0], text)
        yield from chats(module, entries)


def is_held_out(topic: str, share: float) -> bool:
    """Whether a topic is held out: decided by a hash of its name, so that all machines agree."""
    number = int.from_bytes(hashlib.sha256(f"held-out:{topic}".encode()).digest()[:4], "big")
    return number / 2**32 < share


def gather(docs: Path | None, share: float) -> tuple[list[Document], list[Document]]:
    """Return the training documents and the held-out documents; the latter have no chats."""
    everything = [*(documentation(docs) if docs else ()), *standard_library()]
    train = [d for d in everything if not is_held_out(d.topic, share)]
    held = [d for d in everything if is_held_out(d.topic, share) and not d.name.startswith("chat:")]
    random.Random(0).shuffle(train)
    return train, held


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer, trained on the documents, with special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (d.text for d in documents if not d.name.startswith("chat:"))
    tokenizer.train_from_iterator(plain, trainer=trainer)
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the token that begins and ends every document."""
    found = tokenizer.token_to_id(END)
    if found is None:
        raise ValueError(f"The tokenizer has no {END}.")
    return int(found)


def tokenizer_config(context: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": list(SPECIALS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
