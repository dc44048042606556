# SPDX-License-Identifier: Apache-2.0
"""`stratakv generate`: continues one prompt, and prints the text while it is generated.

Only the text goes to standard output; statistics go to standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from ...tiers.settings.format import format_value
from ...tiers.settings.option import flag_of
from ...tiers.settings.values import ConfigError
from ..logs import set_up
from ..request.sampling_params import SamplingParams
from ..sampling.processor_loading import InvalidProcessorParams
from .args import (
    add_engine_arguments,
    add_log_level,
    engine_config_of,
    engine_options_of,
    log_level,
)

if TYPE_CHECKING:
    from ..text.output_processor import TextOutput

DESCRIPTION = "Continue one prompt with a model, in this process."

# Sampling flags: field of SamplingParams → (type, help).
_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to make (default: 64)"),
    "min_tokens": (int, "fewest tokens to make"),
    "temperature": (float, "0, the default, takes the likeliest token"),
    "top_k": (int, "keep the k likeliest tokens"),
    "top_p": (float, "keep the likeliest tokens of this much probability"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "repetition_penalty": (float, "above 1 makes tokens of prompt and output less likely"),
    "presence_penalty": (float, "above 0 makes tokens of the output less likely"),
    "frequency_penalty": (float, "the same for each time that a token is there"),
    "seed": (int, "makes random draws the same every time"),
    "thinking_token_budget": (int, "most tokens of a thought; then its end mark is written"),
}
# Limit of a prompt from standard input, which may be endless. A context has up to 2**24 tokens.
MAX_PROMPT_CHARACTERS = 2**26
# Flags that may be repeated, with one value each, by the field of SamplingParams.
_FLAGS = {"bad_words": "--bad-word"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="the text; - reads standard input")
    for name, (_, text) in _SAMPLING.items():
        parser.add_argument(flag_of(name), metavar="N", default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeat"
    )
    parser.add_argument(
        "--bad-word", metavar="TEXT", action="append", default=[], help="never write this; repeat"
    )
    parser.add_argument(
        "--extra-args", metavar="JSON", help="an object for logits processors of other packages"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    add_log_level(parser, "warning")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print the text. Return 0, or 1 if the request failed."""
    from ..core.setup.model_check import check_model

    if args.prompt is None:
        raise ConfigError("stratakv generate needs --prompt TEXT, or --prompt - for standard input")
    params = _sampling_params(args)
    set_up(log_level(args))
    check_model(engine_config_of(args))
    from ..llm import LLM  # imported late, because a refused model does not need the engine
    from ..text.bad_words import with_spelt_bad_words
    from ..text.reasoning import with_reasoning_marks

    prompt = _read_prompt() if args.prompt == "-" else args.prompt
    with LLM(args.model, progress=_print_progress, **engine_options_of(args)) as llm:
        began = time.monotonic()
        try:
            params = with_spelt_bad_words(params, llm.tokenizer)
            params = with_reasoning_marks(params, llm.marks)
        except ValueError as error:
            raise _flag_error(error) from error
        try:
            request = llm.stream(prompt, params)
        except InvalidProcessorParams as error:
            raise ConfigError(f"--extra-args cannot be used: {error}") from error
        except ValueError as error:
            raise ConfigError(f"--prompt cannot be used: {error}") from error
        num_tokens, last = 0, None
        for last in request:
            num_tokens += len(last.token_ids)
            print(last.text, end="", flush=True)
        print()
        return _report(last, num_tokens, time.monotonic() - began)


def _read_prompt() -> str:
    """Read all of standard input, without a time limit. Raises ConfigError for a long input."""
    try:
        text = sys.stdin.read(MAX_PROMPT_CHARACTERS + 1) if sys.stdin is not None else ""
    except UnicodeError as error:
        raise ConfigError(f"standard input is no text ({error}); save it as UTF-8") from error
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ConfigError(
            f"standard input has more than {MAX_PROMPT_CHARACTERS} characters, which fit into no "
            "context; shorten it"
        )
    return text


def _print_progress(text: str) -> None:
    print(f"stratakv: {text}", file=sys.stderr, flush=True)


def _report(last: TextOutput | None, num_tokens: int, seconds: float) -> int:
    if last is None or last.error is not None:
        print(f"stratakv: {last.error if last else 'nothing came back'}", file=sys.stderr)
        return 1
    reason = last.finish_reason
    print(f"[{num_tokens} tokens in {seconds:.2f} s, ended by {reason}]", file=sys.stderr)
    return 0


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0}
    for name, (kind, _) in _SAMPLING.items():
        if not hasattr(args, name):
            continue
        text = getattr(args, name)
        try:
            given[name] = kind(text)
        except ValueError:
            word = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{flag_of(name)} takes {word}, not {format_value(text)}") from None
    try:
        return SamplingParams(
            **given,
            stop=tuple(args.stop),
            bad_words=tuple(args.bad_word),
            ignore_eos=args.ignore_eos,
            extra_args=_extra_args(args.extra_args),
        )
    except ValueError as error:
        raise _flag_error(error) from error


def _extra_args(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--extra-args takes an object in JSON, not {format_value(text)} ({error})"
        ) from None


def _flag_error(error: ValueError) -> ConfigError:
    """Return a ConfigError with the error's text, but with a flag in place of the field's name."""
    name, _, rest = str(error).partition(" ")
    return ConfigError(f"{_FLAGS.get(name) or flag_of(name)} {rest}")
