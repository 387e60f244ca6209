"""The parse stage: trace the model at its published size."""

from __future__ import annotations

import time

from onboarding.architecture import Architecture
from onboarding.context import StageContext
from onboarding.custom_code.definition import definition_of
from onboarding.problem import Problem
from onboarding.stages.intake.archive import unpack
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.parse.result import ParseResult
from onboarding.weights.index import read_checkpoint
from onboarding.weights.report import PLACEMENTS, words


def run(context: StageContext) -> ParseResult:
    """Parse the definition that intake checked.

    Raises:
        Problem: it cannot be built or traced, see :func:`onboarding.stages.parse.analyse.analyse`; or its own code
            raised, was stopped, or needs a package, see :func:`onboarding.custom_code.confined.call`.
    """
    intake = context.result("intake", IntakeResult)
    context.progress(0, 2, "import transformers")
    from onboarding.stages.parse.plain import parse_definition

    started = time.monotonic()
    definition = definition_of(context)
    checkpoint = read_checkpoint(unpack(context.artifacts.get(intake.definition.digest)))
    where = " in the sandbox" if definition.code else ""
    context.progress(1, 2, f"trace at the published size{where}")
    confined = {"scratch": context.scratch, "unsafe": context.settings.unsafe_no_sandbox}
    try:
        parsed = parse_definition(
            definition,
            tokens=context.options.sequence_length,
            name=intake.name,
            checkpoint=checkpoint,
            **confined,
        )
    except Problem as problem:
        problem.extra.setdefault("read", what_was_read(intake))
        raise
    architecture, weights = parsed.architecture, parsed.weights
    architecture.warnings += _code_notes(intake)
    mapping = None
    if weights is not None:
        from onboarding.weights.proof import proof_on_twin

        context.progress(1.5, 2, "load a synthetic checkpoint of the twin")
        weights.proven = proof_on_twin(definition, parsed.mapping, **confined)
        architecture.warnings += [words(weights)]
        mapping = context.save("weights-mapping.json", PLACEMENTS.dump_json(parsed.mapping), "application/json")
    context.progress(2, 2)
    return ParseResult(
        summary=summary(architecture),
        architecture=architecture,
        weights=weights,
        mapping=mapping,
        seconds=round(time.monotonic() - started, 2),
    )


def what_was_read(intake: IntakeResult) -> str:
    """What is known of a definition that could not be parsed, in one line."""
    text = intake.config.get("text_config")
    fields = {**intake.config, **(text if isinstance(text, dict) else {})}
    named = {
        "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "hidden": ("hidden_size", "d_model", "n_embd", "dim"),
        "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
        "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
        "vocabulary": ("vocab_size",),
    }
    found = {
        word: next((fields[n] for n in names if isinstance(fields.get(n), int)), None) for word, names in named.items()
    }
    sizes = ", ".join(f"{word} {value}" for word, value in found.items() if value is not None)
    parts = [f"model_type {intake.model_type}", f"{len(intake.files)} file{'s' if len(intake.files) != 1 else ''}"]
    parts += [f"imports {', '.join(intake.imports)}"] if intake.imports else []
    parts += [f"suspicious: {'; '.join(intake.suspicious[:3])}"] if intake.suspicious else []
    return "; ".join([*parts, f"config.json says {sizes}" if sizes else "config.json gives no sizes"])


def _code_notes(intake: IntakeResult) -> list[str]:
    """What a reader should know of the definition's own code."""
    if not intake.runs_code:
        return []
    notes = ["the definition's own code was run, in the sandbox only"]
    if intake.suspicious:
        shown = "; ".join(intake.suspicious[:5])
        notes.append(f"its code does what models rarely do, without effect outside the sandbox: {shown}")
    return notes


def summary(architecture: Architecture) -> str:
    """One line: layers by mixer, experts, parameters."""
    counts: dict[str, int] = {}
    for block in architecture.blocks:
        counts[block.mixer] = counts.get(block.mixer, 0) + len(block.layers)
    mixers = " + ".join(f"{count} {mixer}" for mixer, count in counts.items())
    experts = next((b.feed_forward for b in architecture.blocks if b.feed_forward.startswith("MoE")), "")
    census = architecture.census
    size = f"{census.total / 1e9:.1f} B total, {census.active / 1e9:.1f} B active"
    return ", ".join(filter(None, [f"{architecture.num_layers} layers: {mixers}", experts])) + f" · {size}"
