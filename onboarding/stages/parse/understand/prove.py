"""Understanding a model: its reduced twin runs on real tensors, and every claim about a role is checked there."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onboarding.architecture import (
    Architecture,
    BlockKind,
    BlockRoles,
    MixerRole,
    ModelFacts,
    NovelReference,
    Proof,
)
from onboarding.problem import Problem
from onboarding.stages.parse.repair import Attempt, with_repairs
from onboarding.stages.parse.roles import is_norm
from onboarding.stages.parse.structure import find_layers, find_structure
from onboarding.stages.parse.understand.ends import understand_ends
from onboarding.stages.parse.understand.feed_forwards import understand_feed_forward
from onboarding.stages.parse.understand.ledger import Ledger, Sizes
from onboarding.stages.parse.understand.mixers import understand_attention
from onboarding.stages.parse.understand.norms import prove_norm_form, understand_norms
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Call, Observation, observe
from onboarding.stages.parse.understand.parts import LayerView, Part, view_layer
from onboarding.stages.parse.understand.plain import written_attention
from onboarding.stages.parse.understand.positions import SHIFT, multimodal, understand_positions
from onboarding.stages.parse.understand.recurrences import prove_causal, understand_convolution, understand_recurrence
from onboarding.stages.parse.understand.residuals import understand_residual
from onboarding.twin import TwinPlan, derive, models
from onboarding.twin import build as build_twin

BUDGET_S = 120.0
"""Processor seconds after which the layers that are left are said to be unexamined."""
STATES = ("linear", "mamba1", "mamba2", "recurrence")
"""Mixers that carry a state along the sequence."""


@dataclass
class Understanding:
    """What was read off a twin."""

    roles: dict[int, BlockRoles] = field(default_factory=dict)
    """Layer of the published model (the one that a twin layer stands for) -> its roles."""
    facts: ModelFacts | None = None
    proofs: list[Proof] = field(default_factory=list)
    novel: list[NovelReference] = field(default_factory=list)


@dataclass(frozen=True)
class Moved:
    """The first step with its positions moved on."""

    all: Observation | None
    """All of them; None: the model does not run so."""
    streams: list[Observation]
    """One row at a time, where positions have rows for time, height and width."""


def prove(architecture: Architecture, config: dict[str, Any], *, plan: TwinPlan | None = None) -> list[Proof]:
    """Every claim about the roles in a model, with its check on the reduced twin.

    Args:
        architecture: the parsed model; says which layers are of one kind.
        config: its ``config.json``.
        plan: of the twin, where it is known already.

    Returns:
        Proofs; a model that has no twin, or whose twin does not run, gives one unproven claim with the reason.
    """
    return complete(architecture, config, plan=plan).proofs


def complete(architecture: Architecture, config: dict[str, Any], *, plan: TwinPlan | None = None) -> Architecture:
    """The architecture with the roles of its blocks, the facts of the model and all proofs filled in."""
    kinds = [block.layers for block in architecture.blocks]
    found = understand(config, plan=plan, kinds=kinds)
    blocks = [_with_roles(block, _roles_of(block, found)) for block in architecture.blocks]
    return architecture.model_copy(
        update={"blocks": blocks, "facts": found.facts, "proofs": found.proofs, "novel_references": found.novel}
    )


def _with_roles(block: BlockKind, roles: BlockRoles | None) -> BlockKind:
    """A block with its roles; what the trace could not name gets its words from them."""
    if roles is None:
        return block
    states = any(mixer.kind in STATES for mixer in roles.mixers)
    gathers = any(mixer.top_k for mixer in roles.mixers) or any(f.kind == "experts" for f in roles.feed_forwards)
    update: dict[str, Any] = {
        "roles": roles,
        "sequence_dependent": block.sequence_dependent or states,
        "sparse_memory_access": block.sparse_memory_access or gathers,
    }
    unnamed = block.mixer == "none" and bool(roles.mixers)
    if unnamed:  # written out in the layer's own code, which the trace takes for projections
        update["mixer"] = " + ".join(dict.fromkeys(mixer.words() for mixer in roles.mixers))
    if roles.feed_forwards and (unnamed or block.feed_forward == "none"):
        update["feed_forward"] = " + ".join(dict.fromkeys(forward.words() for forward in roles.feed_forwards))
    return block.model_copy(update=update)


def _roles_of(block: BlockKind, found: Understanding) -> BlockRoles | None:
    return next((found.roles[layer] for layer in block.layers if layer in found.roles), None)


def understand(
    config: dict[str, Any], *, plan: TwinPlan | None = None, kinds: list[list[int]] | None = None
) -> Understanding:
    """Derive the twin of a configuration, build both models, and examine the twin."""
    failed = Ledger()

    try:
        plan = plan or derive(config, assume=True)
        full = _published(config)
        twin = build_twin(plan)
    except Problem as problem:
        failed.unproven("parameters", "roles", f"no reduced twin: {problem.title}. {problem.detail}"[:400])
        return Understanding(proofs=failed.proofs)
    except Exception as error:
        failed.unproven("parameters", "roles", f"no reduced twin: {type(error).__name__}: {error}"[:400])
        return Understanding(proofs=failed.proofs)
    try:
        return understand_twin(full, twin, list(plan.layers), kinds or [])
    except Exception as error:  # a twin that does not run under observation must not take the parse down
        failed.unproven("parameters", "roles", f"the twin was not examined: {type(error).__name__}: {error}"[:400])
        return Understanding(proofs=failed.proofs)


def _published(config: dict[str, Any]) -> nn.Module:
    """The published model without memory; what stays in float32 then is so by its own code."""

    def attempt(fields: dict[str, Any], state: Attempt) -> nn.Module:
        state.config = models.resolve(fields)
        return models.on_meta(state.config)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return with_repairs(config, attempt, assume=True)[0]
    finally:
        torch.set_default_dtype(before)


def understand_twin(full: nn.Module, twin: Any, layers: list[int], kinds: list[list[int]]) -> Understanding:
    """Examine a twin.

    Args:
        full: the published model, without memory: sizes are read off it.
        twin: the reduced one, with real values.
        layers: for each layer of the twin, the published layer whose kind it has.
        kinds: published layers of one kind.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.process_time()
        _fill_tables(twin)
        steps = (observe(twin, seed=0), observe(twin, seed=1))
        moved = Moved(_shifted(twin, steps[0]), _streams(twin))
        found = Understanding()
        prefix, stack = find_layers(twin, twin.config)
        _, full_stack = find_layers(full, full.config)
        for index in [kind.first for kind in find_structure(twin, twin.config).kinds]:
            stands_for = layers[index] if index < len(layers) else index
            ledger = Ledger(layers=next((kind for kind in kinds if stands_for in kind), [stands_for]))
            if time.process_time() - started > BUDGET_S:
                ledger.unproven("mixer", "roles", f"not examined: {BUDGET_S:g} s were spent on the layers before")
                found.proofs += ledger.proofs
                continue
            sizes = Sizes(
                stack[index],
                full_stack[stands_for],
                models.stack_fields(twin),
                models.stack_fields(full),
            )
            found.roles[stands_for] = _layer(steps, moved, f"{prefix}.{index}", index, ledger, sizes)
            found.proofs += ledger.proofs
            found.novel += [n for n in ledger.novel if n.module not in {k.module for k in found.novel}]
        ledger = Ledger()
        _final_norms(steps[0], prefix, ledger)
        found.facts = understand_ends(steps[0], full, prefix, ledger)
        found.facts.positions = _positions(found.proofs)
        found.proofs += ledger.proofs
        found.novel += ledger.novel
    return found


def _fill_tables(twin: nn.Module) -> None:
    """Give tables from tokens to experts, which a checkpoint would fill, distinct random entries."""
    generator = torch.Generator().manual_seed(11)
    for module in twin.modules():
        count = getattr(module, "num_experts", None)
        for table in module._buffers.values():
            if table is None or table.is_floating_point() or table.dim() != 2 or not isinstance(count, int):
                continue
            if table.shape[1] <= count and bool((table == table[0, 0]).all()):
                rows = torch.rand(table.shape[0], count, generator=generator).argsort(-1)
                table.copy_(rows[:, : table.shape[1]])


def _positions(proofs: list[Proof]) -> str:
    said = [p.claim.removeprefix("frequencies: ") for p in proofs if p.claim.startswith("frequencies: ") and p.proven]
    return "; ".join(dict.fromkeys(said))


def _streams(twin: Any) -> list[Observation]:
    if not multimodal(twin.config):
        return []
    return [observe(twin, seed=0, shift=SHIFT, stream=stream) for stream in range(3)]


def _shifted(twin: Any, base: Observation) -> Observation | None:
    """The first step with all positions moved on: as modules are given them, else as the model's code counts them."""
    for shift in (SHIFT, 7):  # a table of learned positions may be short
        try:
            moved = observe(twin, seed=0, shift=shift)
            return moved if _differs(base, moved) else observe(twin, seed=0, shift=shift, own=True)
        except Exception:
            continue
    return None


def _differs(a: Observation, b: Observation) -> bool:
    queries = [[c.inputs["q"] for c in step.calls if c.kind == "attention"] for step in (a, b)]
    return any(not torch.allclose(x, y, atol=1e-6) for x, y in zip(*queries, strict=False))


def _final_norms(step: Observation, prefix: str, ledger: Ledger) -> None:
    outside = [c for c in step.calls if c.kind == "module" and not (c.path + ".").startswith(prefix + ".")]
    for call in outside:
        module: Any = call.function
        if is_norm(module) and call.tensors():
            prove_norm_form(call, "final", ledger)


def _layer(
    steps: tuple[Observation, Observation],
    moved: Moved,
    path: str,
    index: int,
    ledger: Ledger,
    sizes: Sizes,
) -> BlockRoles:
    view = view_layer(steps[0], path, index)
    roles = BlockRoles()
    for part in view.of("mixer"):
        roles.mixers += _mixer(part, steps, moved, ledger, sizes)
    for part in view.of("feed-forward"):
        roles.feed_forwards.append(understand_feed_forward(part, steps, ledger, sizes, path))
    roles.residual = understand_residual(view, steps[0], ledger)
    roles.norms = understand_norms(view, steps[0], ledger)
    _leftovers(view, ledger)
    return roles


def _mixer(
    part: Part, steps: tuple[Observation, Observation], moved: Moved, ledger: Ledger, sizes: Sizes
) -> list[MixerRole]:
    found: list[MixerRole] = []
    calls = _attention(part, steps[0])
    others = _attention(part, moved.all) if moved.all is not None else []
    rows = [_attention(part, step) for step in moved.streams]
    for place, call in enumerate(calls):
        role = understand_attention(part, call, steps, ledger, sizes)
        shifted = others[place] if place < len(others) else None
        streams = [calls[place] for calls in rows if place < len(calls)]
        understand_positions(call, shifted, streams, part.call, role, steps[0].model, ledger, sizes)
        found.append(role)
    states = understand_recurrence(part, steps[0], ledger, sizes, attended=bool(found))
    if states:
        prove_causal(part, steps[0], ledger)
    found += states
    if not found:
        convolution = understand_convolution(part, steps[0], ledger)
        found = [convolution] if convolution else []
    if not found:
        keep_subgraph(part.call, "mixer", ledger)
        chooses = bool(steps[0].during(part.call, "topk"))
        found = [MixerRole(kind="recurrence" if part.moves and part.moves.unbounded and not chooses else "novel")]
        prove_causal(part, steps[0], ledger)
    return found


def _attention(part: Part, step: Observation) -> list[Call]:
    return step.during(part.call, "attention") or written_attention(part, step)


def _leftovers(view: LayerView, ledger: Ledger) -> None:
    """Parts with weights that are neither norm, mixer nor feed-forward and that no claim names: novel."""
    named = {proof.claim.partition(":")[0] for proof in ledger.proofs}
    for part in view.of("other"):
        if any(True for _ in part.module.parameters()) and type(part.module).__name__ not in named:
            keep_subgraph(part.call, "residual", ledger)
