"""Structured answers: how they are asked for in each mode, and how one is read whatever the server made of it."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agents.llm.errors import Invalid, Refused
from onboarding.settings import AnswerMode

MODES: tuple[AnswerMode, ...] = ("schema", "tool", "json", "text")
"""From the strictest to the one that every server has."""
LONGEST_ANSWER = 400_000
"""Characters that are looked at."""

_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)


class Answer(BaseModel):
    """Base of what the roles answer: every field is required, nothing else may stand there."""

    # what stands under a field is its description in the schema
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


A = TypeVar("A", bound=Answer)


def name_of(schema: type[Answer]) -> str:
    """The name by which the endpoint knows a schema."""
    return schema.__name__.lower()


def asking(schema: type[Answer], mode: AnswerMode) -> dict[str, Any]:
    """Members of the request body that ask for ``schema`` in ``mode``."""
    name, body = name_of(schema), schema.model_json_schema()
    if mode == "schema":
        wanted = {"name": name, "schema": body, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": wanted}}
    if mode == "tool":
        description = (schema.__doc__ or name).strip().splitlines()[0]
        function = {"name": name, "description": description, "parameters": body}
        return {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": name}},
        }
    return {"response_format": {"type": "json_object"}} if mode == "json" else {}


def instructions(schema: type[Answer], mode: AnswerMode) -> str:
    """What the prompt has to say about the form of the answer."""
    if mode == "tool":
        return f"Answer by one call of the function {name_of(schema)}."
    text = "Answer with one JSON object and nothing else."
    # in schema mode, too: many servers hold the answer to the schema and never show it to the model
    return f"{text} It must match this JSON schema:\n{json.dumps(schema.model_json_schema(), sort_keys=True)}"


def read(message: dict[str, Any], finish_reason: str | None, schema: type[A]) -> A:
    """The answer in an assistant's message.

    Raises:
        Refused: the model declines.
        Invalid: it is cut off, no JSON, or does not match the schema; the message says what is wrong.
    """
    if message.get("refusal"):
        raise Refused(str(message["refusal"])[:500])
    if finish_reason == "content_filter":
        raise Refused("the endpoint's content filter stopped the answer")
    for candidate in _candidates(message):
        data = _json(candidate)
        if data is not None:
            break
    else:
        cut = "it is cut off at the limit of tokens" if finish_reason == "length" else "it holds no JSON object"
        raise Invalid(cut)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[:4]
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'answer'}: {e['msg']}" for e in first)
        raise Invalid(f"it does not match the schema: {wrong}") from error


def _candidates(message: dict[str, Any]) -> list[Any]:
    """Places where an answer may stand, most telling first: tool calls (new and old style), parsed, content."""
    calls = message.get("tool_calls") or []
    found = [(call.get("function") or {}).get("arguments") for call in calls if isinstance(call, dict)]
    found.append((message.get("function_call") or {}).get("arguments"))
    found.append(message.get("parsed"))
    content = message.get("content")
    if isinstance(content, list):  # a list of parts
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    found.append(content)
    return [candidate for candidate in found if candidate]


def _json(candidate: Any) -> dict[str, Any] | None:
    """The JSON object in an arguments object, in a text, or in a text around it."""
    if isinstance(candidate, dict):
        return candidate
    text = _THOUGHT.sub("", str(candidate)[:LONGEST_ANSWER]).strip()
    fenced = [match.strip() for match in _FENCED.findall(text)]
    for attempt in (text, *fenced, text[text.find("{") : text.rfind("}") + 1]):
        try:
            data = json.loads(attempt, strict=False)
        except ValueError:
            continue
        if isinstance(data, str):  # JSON in JSON
            return _json(data) if data != candidate else None
        if isinstance(data, dict):
            return data
    return None
