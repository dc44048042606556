# SPDX-License-Identifier: Apache-2.0
"""`stratakv trace explain|export`: reads a file that `--step-trace` wrote.

Both subcommands read the last run of an engine in the file. `explain` prints the history of a
request in words, or lists the requests; `export` makes a timeline for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.format import format_value, one_line
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ..trace.explain import explain
from ..trace.records import read_records
from ..trace.stories import State, Story, last_run, stories_of
from ..trace.timeline import write_timeline
from .args import Parser

DESCRIPTION = "Read a step trace: explain one request, or export a timeline."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's name to the parser. Each subcommand parses the remaining arguments."""
    parser.add_argument("word", metavar="explain|export", nargs="?", help="see the documentation")
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER,
        help="explain: FILE, REQUEST, --json; export: FILE, --out",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.word not in _WORDS:
        near = did_you_mean(args.word or "", _WORDS)
        given = "" if args.word is None else f", not {args.word!r}{near}"
        raise ConfigError(f"stratakv trace takes {', '.join(_WORDS)}{given}")
    return _WORDS[args.word](args.rest)


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="that --step-trace wrote")
    parser.add_argument(
        "request", metavar="REQUEST", nargs="?",
        help="a request's id or the beginning of one; without it, all requests are listed",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object for each request")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="that --step-trace wrote")
    parser.add_argument(
        "--out", metavar="FILE", help="where the timeline goes (default: FILE.json beside it)"
    )


def _explain(words: list[str]) -> int:
    parser = Parser(prog="stratakv trace explain", description=DESCRIPTION)
    add_explain_arguments(parser)
    args = parser.parse_all(words)
    path = readers.path("FILE", args.file)
    stories = list(stories_of(last_run(read_records(path))))
    if args.request is not None:
        stories = _named(args.request, stories, path)
    for story in stories:
        if args.json:
            print(json.dumps(_as_json(story)))
        elif args.request is not None:
            print("\n".join(one_line(line) for line in explain(story)))
        else:
            print(_row(story))
    if not stories:
        print("no requests were recorded", file=sys.stderr)
    return 0


def _named(request: str, stories: list[Story], path: Path) -> list[Story]:
    """Return the history of the request whose id is, or begins with, the text `request`."""
    exact = [story for story in stories if story.request_id == request]
    found = exact or [story for story in stories if story.request_id.startswith(request)]
    ids = list(dict.fromkeys(story.request_id for story in found))
    if not found:
        near = did_you_mean(request, {story.request_id: None for story in stories})
        raise ConfigError(
            f"{path} has no request {format_value(request)} in its last run{near}; `stratakv "
            f"trace explain {path}` lists them"
        )
    if len(ids) > 1:
        raise ConfigError(
            f"{len(ids)} requests of {path} begin with {format_value(request)}, such as "
            f"{one_line(ids[0])} and {one_line(ids[1])}; give more of the id"
        )
    return found


def _row(story: Story) -> str:
    waited = sum(story.waits().values())
    end = "unfinished" if story.last is None else story.last.cause
    return (
        f"{one_line(story.request_id)}  {story.num_prompt_tokens} prompt tokens, waited "
        f"{waited:.3f} s, loaded {story.seconds_in(State.LOADING):.3f} s, preempted "
        f"{story.num_preemptions} times, {end}"
    )


def _as_json(story: Story) -> dict[str, Any]:
    return {
        "request_id": story.request_id,
        "num_prompt_tokens": story.num_prompt_tokens,
        "queued_seconds": story.queued,
        "waits": [
            {"obstacle": obstacle, "behind": behind, "seconds": seconds}
            for (obstacle, behind), seconds in story.waits().items()
        ],
        "loading_seconds": story.seconds_in(State.LOADING),
        "running_seconds": story.seconds_in(State.RUNNING),
        "tokens_found": story.tokens_found(),
        "num_computed_tokens": story.num_computed_tokens,
        "num_preemptions": story.num_preemptions,
        "finish_reason": None if story.last is None else story.last.cause,
    }


def _export(words: list[str]) -> int:
    parser = Parser(prog="stratakv trace export", description=DESCRIPTION)
    add_export_arguments(parser)
    args = parser.parse_all(words)
    path = readers.path("FILE", args.file)
    beside = path.with_name(f"{path.name}.json")
    out = beside if args.out is None else readers.path("--out", args.out)
    records = last_run(read_records(path))
    try:
        with out.open("w", encoding="utf-8") as file:
            count = write_timeline(records, file)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    print(f"{out}: {count} events; open it at https://ui.perfetto.dev")
    return 0


_WORDS: Mapping[str, Callable[[list[str]], int]] = {"explain": _explain, "export": _export}
