# SPDX-License-Identifier: Apache-2.0
"""The tools of a request (functions that an answer may or must call), and the calls in an answer.
`tool_choice` determines whether the prompt lists the tools, and the form of the answer:

    tool_choice   prompt      answer
    none          no tools    content
    auto          tools       free text, in which a parser of the model's form finds calls
    required      tools       a list of calls; a grammar enforces each tool's schema
    a function    tools       the arguments of that function; a grammar enforces its schema"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from .....tiers.settings.format import format_value
from .....tiers.settings.suggestions import did_you_mean
from ....request.structured_params import StructuredOutputsParams
from ....text.detokenizer import Decoder, HidingDecoder
from ....text.output_processor import TextOutput
from ....text.reasoning import ReasoningMarks
from ....text.tool_calls.base import ToolCallParser
from ....text.tool_calls.json_calls import ArgumentsParser, ListParser
from ....text.tool_calls.tool_formats import FLAG, PARSERS
from ...api_errors import ApiError
from ...api_settings import ApiSettings
from ...front import Front
from ..request.protocol import ChatRequest, FunctionDefinition, ToolDefinition
from ..request.structured import structured_outputs_of

# Tool names: OpenAI's characters, and the separators `.:/` between a server's name and a tool's.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# Keywords of a JSON schema that contain values, which may be null.
_VALUES = ("const", "default", "enum", "example", "examples")
_MODES = ("auto", "none", "required")
_NAMED = "named"
# Request fields that set the form of the whole answer, which then cannot contain a tool call.
_FORMS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_json_object", "response_format",
)  # fmt: skip


class CallReader:
    """Reads the tool calls in one answer. `only_first`: calls after the first call are dropped.
    `ends_with_calls`: the finish reason of an answer with calls is `tool_calls`."""

    def __init__(self, parser: ToolCallParser, *, only_first: bool, ends_with_calls: bool) -> None:
        self._parser = parser
        self._only_first = only_first
        self._ends_with_calls = ends_with_calls
        self._has_calls = False
        self._arguments: list[str] = []  # the arguments of the last call

    def read(self, output: TextOutput) -> None:
        """Move the tool calls in an output of the engine from its text to its `tool_calls`."""
        content, pieces = self._parser.push(output.text)
        if output.finish_reason is not None:
            rest = self._parser.finish()
            content, pieces = content + rest.content, [*pieces, *rest.calls]
        if self._only_first:
            pieces = [piece for piece in pieces if piece.number == 0]
        output.text, output.tool_calls = content, pieces
        self._has_calls = self._has_calls or bool(pieces)
        for piece in pieces:
            self._arguments = [*([] if piece.name else self._arguments), piece.arguments]
        if output.finish_reason == "stop" and self._has_calls and self._ends_with_calls:
            # A stop string or stop token may cut the last call off, so its JSON is checked.
            if output.stop_reason is None or _is_json("".join(self._arguments)):
                output.finish_reason = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolUse:
    shown: list[Mapping[str, object]] | None = None  # the tools that the template gets
    structured_outputs: StructuredOutputsParams | None = None  # set if the answer must be a call
    make_parser: Callable[[], ToolCallParser] | None = None  # None: calls stay in the text
    new_id: Callable[[], str] = ToolCallParser.new_id
    only_first: bool = False
    ends_with_calls: bool = True  # False if `tool_choice` is a function: OpenAI reports `stop`
    marks: ReasoningMarks | None = None  # the marks around thoughts in the answer's text
    decoder: Decoder | None = None  # decodes answers with calls; None: the tokenizer decodes

    def reader(self) -> CallReader | None:
        """Return a new `CallReader` for one answer; None if calls stay in the text."""
        if self.make_parser is None:
            return None
        return CallReader(
            self.make_parser(), only_first=self.only_first, ends_with_calls=self.ends_with_calls
        )


class _Choice(NamedTuple):
    mode: str  # "auto", "none", "required", or "named" if `tool_choice` names a function
    name: str = ""


def tools_of(front: Front, request: ChatRequest) -> ToolUse:
    """Return how a request's answer uses tools. Raises ApiError, with the field's path, for invalid
    tools, for a `tool_choice` of an unknown tool, and for fields that contradict `tool_choice`."""
    tools = request.tools or []
    if not tools and request.tool_choice in (None, "auto", "none"):  # some clients always send auto
        return ToolUse(marks=front.marks)
    shown = template_tools(front.settings, tools)
    choice = _choice_of(request, tools)
    if choice.mode == "none":
        return ToolUse(marks=front.marks)
    front.need_tokenizer("tools", "leave out `tools`")
    _refuse_other_forms(front, request, choice)
    form = ToolCallParser if front.tool_format is None else front.tool_format.parser
    use = ToolUse(
        shown,
        new_id=form.new_id,
        only_first=request.parallel_tool_calls is False,
        ends_with_calls=choice.mode != _NAMED,
        marks=front.marks,
    )
    if choice.mode == "auto":
        is_result = bool(request.messages) and request.messages[-1].role == "tool"
        names = [tool.function.name for tool in tools]
        return _by_parser(front, use, names, is_result=is_result)
    return _by_grammar(use, tools, choice)


def template_tools(
    settings: ApiSettings, tools: Sequence[ToolDefinition]
) -> list[Mapping[str, object]] | None:
    """Return the tools in the template's form; None for no tools. Raises ApiError for bad tools."""
    if not tools:
        return None
    most, known = settings.max_tools_per_request, set()
    if len(tools) > most:
        raise _invalid("tools", f"`tools` holds {len(tools)} tools and at most {most} are taken")
    for index, tool in enumerate(tools):
        place, name = f"tools[{index}].function", tool.function.name
        if not _NAME.fullmatch(name):
            message = (
                f"`{place}.name` must have 1 to 128 letters, digits and _ - . : /, got "
                f"{name[:140]!r}"
            )
            raise _invalid(f"{place}.name", message)
        if name in known:
            message = f"`{place}.name` is {name}, as of a tool before it; names must differ"
            raise _invalid(f"{place}.name", message)
        known.add(name)
        _check_schema(f"{place}.parameters", tool.function.parameters)
    shown = [_as_template_sees(tool.function) for tool in tools]
    size, most = len(msgspec.json.encode(shown)), settings.max_tools_bytes
    if size > most:
        message = f"`tools` takes {size} bytes as JSON and at most {most} are taken; send fewer"
        raise _invalid("tools", message)
    return shown


def template_tools_of(given: object) -> list[Mapping[str, object]] | None:
    """Return `template_tools` for callers of the Python API, whose tools are dicts in the form of
    the HTTP API's JSON. Raises ValueError."""
    try:
        tools = msgspec.convert(given or [], list[ToolDefinition])
        return template_tools(ApiSettings(), tools)
    except msgspec.ValidationError as error:
        raise ValueError(f"tools cannot be used: {error}") from None
    except ApiError as error:
        raise ValueError(error.message) from None


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _check_schema(place: str, schema: Mapping[str, Any] | None) -> None:
    """Raise ApiError unless the schema describes an object; the compiler checks other keywords."""
    schema = without_nulls(schema or {})
    kind = schema.get("type", "object")
    if kind != "object":
        message = (
            f"`{place}.type` must be object, since arguments are one, got {format_value(kind)}"
        )
        raise _invalid(f"{place}.type", message)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        message = f"`{place}.properties` must be an object of JSON schemas"
        raise _invalid(f"{place}.properties", f"{message}, got {format_value(properties)}")
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        message = f"`{place}.required` must be a list of names, got {format_value(required)}"
        raise _invalid(f"{place}.required", message)


def _as_template_sees(function: FunctionDefinition) -> Mapping[str, object]:
    """Return a function for the template, with its fields in the order of the models' training."""
    seen: dict[str, object] = {"name": function.name}
    if function.description is not None:
        seen["description"] = function.description
    if function.parameters is not None:
        seen["parameters"] = function.parameters
    return {"type": "function", "function": seen}


def _choice_of(request: ChatRequest, tools: Sequence[ToolDefinition]) -> _Choice:
    given = "auto" if request.tool_choice is None else request.tool_choice
    if isinstance(given, str) and given in _MODES:
        choice = _Choice(given)
    else:
        function = given.get("function") if isinstance(given, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        is_whole = given == {"type": "function", "function": {"name": name}}
        if not isinstance(name, str) or not is_whole:
            message = (
                f"`tool_choice` takes {', '.join(_MODES)} or "
                f'{{"type": "function", "function": {{"name": …}}}}, not {format_value(given)}'
            )
            raise _invalid("tool_choice", message)
        choice = _Choice(_NAMED, name)
    if not tools:
        message = "`tool_choice` asks for a call, and there are no `tools`; send them with it"
        raise _invalid("tool_choice", message)
    names = [tool.function.name for tool in tools]
    if choice.mode == _NAMED and choice.name not in names:
        near = did_you_mean(choice.name, names)
        message = f"`tool_choice` names {choice.name[:64]!r}, which is none of `tools`{near}"
        raise _invalid("tool_choice", message)
    return choice


def _refuse_other_forms(front: Front, request: ChatRequest, choice: _Choice) -> None:
    other = structured_outputs_of(front, request)
    # `auto` allows a structural tag, which may describe calls in the client's own form.
    if other is None or (choice.mode == "auto" and other.structural_tag is not None):
        return
    name = next(name for name in _FORMS if getattr(request, name) not in (None, False))
    message = (
        f"`{name}` says what the whole answer has to look like, so no tool could be called; leave "
        "it out, or send `tool_choice` none"
    )
    raise _invalid(name, message)


def _by_parser(front: Front, use: ToolUse, names: Sequence[str], *, is_result: bool) -> ToolUse:
    """Return `use` with a parser that finds tool calls in free text. Raises ApiError if the model's
    form of calls is unknown, unless the last message is a tool's result (`is_result`)."""
    if front.tool_format is None and is_result:
        return use  # the chat template gets the tool's result as text
    if front.tool_format is None:
        message = (
            "the form in which this model calls tools is not known: its chat template shows none; "
            f"start the server with {FLAG} {', '.join(PARSERS)} or one of another package, or send "
            "`tool_choice` required or a function"
        )
        raise ApiError(message, param="tool_choice", code="no_tool_parser")
    parser, hidden = front.tool_format
    use = replace(use, make_parser=partial(parser, names))
    if hidden is None or front.tokenizer is None:
        return use
    marks = None if front.marks is None else replace(front.marks, hidden_token_ids=hidden)
    return replace(use, marks=marks, decoder=HidingDecoder(front.tokenizer, hidden))


def _by_grammar(use: ToolUse, tools: Sequence[ToolDefinition], choice: _Choice) -> ToolUse:
    """Return `use` with a schema for one call or a list of calls. The schema allows no white space
    between JSON tokens, because small models may write white space without end."""
    names = [tool.function.name for tool in tools]
    schemas = [_schema_of(tool.function) for tool in tools]
    make_parser: Callable[[], ToolCallParser]
    if choice.mode == _NAMED:
        schema = schemas[names.index(choice.name)]
        make_parser = partial(ArgumentsParser, [choice.name])
    else:
        schema = _list_schema(names, schemas, 1 if use.only_first else None)
        make_parser = partial(ListParser, names)
    try:
        outputs = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    except ValueError as error:
        raise _invalid("tools", f"`tools` cannot be followed: {error}") from None
    return replace(use, structured_outputs=outputs, make_parser=make_parser)


def _schema_of(function: FunctionDefinition) -> dict[str, Any]:
    if function.parameters is None:  # a function without parameters
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **without_nulls(function.parameters)}


def without_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without keywords whose value is null, which some languages write for an
    empty list. Keywords that contain values, such as `enum`, stay unchanged."""
    found: dict[str, Any] = _without_nulls(schema)
    return found


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _VALUES else _without_nulls(value)
        for name, value in schema.items()
        if value is not None or name in _VALUES
    }


def _list_schema(
    names: Sequence[str], schemas: Sequence[dict[str, Any]], most: int | None
) -> dict[str, Any]:
    """Return the JSON schema of a list of calls; its `$defs` contain each tool's schema."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/t{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(names)
    ]
    limits = {} if most is None else {"maxItems": most}
    return {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        **limits,
        "$defs": {f"t{i}": _moved(schema, f"#/$defs/t{i}") for i, schema in enumerate(schemas)},
    }


def _moved(schema: Any, place: str) -> Any:
    """Return the schema with references (`$ref`) that are right at `place` in another schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")
