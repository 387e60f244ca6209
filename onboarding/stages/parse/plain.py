"""Parsing as plain data in and out, so that it can run in the sandbox, and the check of what comes back from there."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernel_templates.registry import load_spec
from onboarding.architecture import Architecture, OperatorUse
from onboarding.custom_code.confined import call
from onboarding.custom_code.definition import Definition
from onboarding.problem import Problem
from onboarding.weights.index import Checkpoint, Entry
from onboarding.weights.report import make_report
from onboarding.weights.result import Placement, WeightsReport

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.<>]*\Z")
_NAMES = re.compile(r"[\w.*:,+ -]{0,200}\Z", re.ASCII)
"""Attributes, functions and the short words that hooks add: names and numbers, nothing that could be more."""


def architecture_of(
    config: dict[str, Any], *, tokens: int, name: str, tensors: list[list[Any]] | None = None
) -> dict[str, Any]:
    """The architecture as JSON holds it, whether its backward ran, and how a checkpoint's tensors fit.

    Args:
        config: content of ``config.json``.
        tokens: sequence length at which FLOPs and bytes are counted.
        name: what to call the model.
        tensors: (name, file, shape or null, dtype) of the checkpoint; None if the definition has no index.

    Raises:
        Problem: see :func:`onboarding.stages.parse.analyse.analyse`.
    """
    from onboarding.stages.parse.analyse import analyse
    from onboarding.stages.parse.understand.prove import complete
    from onboarding.twin.threads import one_thread
    from onboarding.weights.match import matched_weights

    with one_thread(), named_failure(config):
        parsed = analyse(config, tokens=tokens, name=name)
        weights = None
        if tensors is not None:
            entries = {
                n: Entry(name=n, file=file, shape=tuple(shape) if shape is not None else None, dtype=dtype)
                for n, file, shape, dtype in tensors
            }
            weights = matched_weights(parsed.model, entries)
        architecture = complete(parsed.architecture, config)
    return {
        "architecture": architecture.model_dump(mode="json"),
        "complete": parsed.trace.backward,
        "weights": weights,
    }


@contextmanager
def named_failure(config: dict[str, Any]) -> Iterator[None]:
    """What a class or the parser itself raises and nothing else names, as a problem with the field where one is found.

    Raises:
        Problem: ``model-not-parsed``.
    """
    from onboarding.stages.parse.blame import blame

    try:
        yield
    except Problem:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = Problem(
            "model-not-parsed",
            "this definition could not be parsed",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}, raised at {Path(frame.filename).name}:"
            f"{frame.lineno}",
        )
        blame(problem, error, None, config)
        raise problem from error


@dataclass(frozen=True, kw_only=True)
class ParsedDefinition:
    """What parsing gave, checked."""

    architecture: Architecture
    complete: bool
    """Its backward ran."""
    weights: WeightsReport | None = None
    mapping: list[Placement] = field(default_factory=list)


def parse_definition(
    definition: Definition, *, tokens: int, name: str, checkpoint: Checkpoint | None = None, **where: Any
) -> ParsedDefinition:
    """Parse a definition, in the sandbox if it has code.

    Args:
        definition: configuration and code.
        tokens: sequence length at which FLOPs and bytes are counted.
        name: what to call the model.
        checkpoint: its published weights' index, if it came with the definition.
        where: scratch, unsafe and limits of :func:`onboarding.custom_code.confined.call`.

    Raises:
        Problem: refused, or ``code-wrong-answer``: what the sandbox answered is no architecture.
    """
    function = "onboarding.stages.parse.plain:architecture_of"
    tensors = checkpoint and [[e.name, e.file, e.shape, e.dtype] for e in checkpoint.entries.values()]
    answer = call(function, definition, {"tokens": tokens, "name": name, "tensors": tensors}, **where)
    weights: WeightsReport | None = None
    mapping: list[Placement] = []
    try:
        architecture = Architecture.model_validate(answer["architecture"])
        complete = bool(answer["complete"])
        if definition.code is not None:
            check_answer(architecture, tokens, load_spec)
        if checkpoint is not None:
            weights, mapping = make_report(checkpoint, answer["weights"])
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        if definition.code is None:
            raise
        raise Problem(
            "code-wrong-answer",
            "the definition's code made the parser answer something that is no architecture",
            " ".join(str(error).split())[:300],
        ) from None
    return ParsedDefinition(architecture=architecture, complete=complete, weights=weights, mapping=mapping)


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
        for text in (*binding.attributes.values(), binding.function or ""):
            if not _NAMES.match(text):
                raise ValueError(f"operator {use.digest[:12]} is bound to {text[:80]!r}, which is no name")
