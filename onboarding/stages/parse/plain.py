"""Parsing as plain data in and out, so that it can run in the sandbox, and the check of what comes back from there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from kernel_templates.registry import load_spec
from onboarding.architecture import Architecture, OperatorUse
from onboarding.custom_code.confined import call
from onboarding.custom_code.definition import Definition
from onboarding.problem import Problem

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.<>]*\Z")


def architecture_of(config: dict[str, Any], *, tokens: int, name: str) -> dict[str, Any]:
    """The architecture as JSON holds it, and whether its backward ran.

    Raises:
        Problem: see :func:`onboarding.stages.parse.analyse.analyse`.
    """
    from onboarding.stages.parse.analyse import analyse

    parsed = analyse(config, tokens=tokens, name=name)
    return {"architecture": parsed.architecture.model_dump(mode="json"), "complete": parsed.trace.backward}


def parse_definition(definition: Definition, *, tokens: int, name: str, **where: Any) -> tuple[Architecture, bool]:
    """Parse a definition, in the sandbox if it has code.

    Args:
        definition: configuration and code.
        tokens: sequence length at which FLOPs and bytes are counted.
        name: what to call the model.
        where: scratch, unsafe and limits of :func:`onboarding.custom_code.confined.call`.

    Returns:
        The architecture, and whether it is complete (its backward ran).

    Raises:
        Problem: refused, or ``code-wrong-answer``: what the sandbox answered is no architecture.
    """
    function = "onboarding.stages.parse.plain:architecture_of"
    answer = call(function, definition, {"tokens": tokens, "name": name}, **where)
    try:
        architecture = Architecture.model_validate(answer["architecture"])
        complete = bool(answer["complete"])
        if definition.code is not None:
            check_answer(architecture, tokens, load_spec)
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        if definition.code is None:
            raise
        raise Problem(
            "code-wrong-answer",
            "the definition's code made the parser answer something that is no architecture",
            " ".join(str(error).split())[:300],
        ) from None
    return architecture, complete


def check_answer(architecture: Architecture, tokens: int, load: Callable[[dict[str, Any]], Any]) -> None:
    """What later stages rely on: operators are what their digests say, names are names, layers are counted.

    Raises:
        ValueError: it is not so.
    """
    if architecture.sequence_length != tokens or len(architecture.strip) != architecture.num_layers:
        raise ValueError("lengths that do not agree")
    if sorted(layer for block in architecture.blocks for layer in block.layers) != list(range(architecture.num_layers)):
        raise ValueError("blocks that do not cover the layers once")
    for use in architecture.uses:
        _check_use(use, load(use.spec))


def _check_use(use: OperatorUse, spec: Any) -> None:
    if spec.digest() != use.digest:
        raise ValueError(f"operator {use.digest[:12]} is not what its spec says")
    if use.calls < 1 or not use.bindings:
        raise ValueError(f"operator {use.digest[:12]} is used nowhere")
    for binding in use.bindings:
        if not _TARGET.match(binding.target):
            raise ValueError(f"{binding.target[:80]!r} is no class")
        names = [*binding.attributes.values(), *([binding.function] if binding.function else [])]
        if not all(part.isidentifier() for name in names for part in name.split(".")):
            raise ValueError(f"operator {use.digest[:12]} is bound to something that is no name")
