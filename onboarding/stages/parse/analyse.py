"""The whole parse as one function: configuration in, architecture out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from onboarding.architecture import Architecture, Attention, BlockKind, GraphOperator, Growth
from onboarding.problem import Problem
from onboarding.stages.parse.blame import blame
from onboarding.stages.parse.build import build_config, build_model
from onboarding.stages.parse.census import block_parameters, count_parameters, prediction_layers
from onboarding.stages.parse.describe import feed_forward_words, kind_mixers, letters_for
from onboarding.stages.parse.eager import eager_costs
from onboarding.stages.parse.growth import add, laws_of, scale, totals
from onboarding.stages.parse.memory import estimate_memory
from onboarding.stages.parse.repair import Attempt, Repair, with_repairs
from onboarding.stages.parse.roles import AUDIO, VISION, ModelRoles, find_roles
from onboarding.stages.parse.sanity import check_sizes
from onboarding.stages.parse.structure import Kind, Structure, embedding_of, find_structure
from onboarding.stages.parse.trace import trace_model
from onboarding.stages.parse.tracer import Operation, Trace
from onboarding.stages.parse.uses.propose import Proposals, propose_uses

SHOWN_TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A parsed model with the objects that it was read from."""

    architecture: Architecture
    model: nn.Module
    config: Any
    structure: Structure
    roles: ModelRoles
    trace: Trace


def analyse(config: dict[str, Any], *, tokens: int, name: str = "", assume: bool = False) -> Parsed:
    """Parse a ``config.json`` at its full published size, with no weights in memory.

    Args:
        config: its content.
        tokens: sequence length at which FLOPs and bytes are counted, batch 1.
        name: what to call the model.
        assume: give round sizes to counts that nothing determines, see :mod:`onboarding.stages.parse.repair`.

    Raises:
        Problem: what cannot be built or traced, and why; ``field`` names the field at fault where one was found,
            ``partial`` holds what could be read before.
    """
    check_sizes(config)
    traced, _, repairs = trace_with_repairs(config, tokens=tokens, assume=assume)
    model, structure, trace = traced.model, traced.structure, traced.trace
    built: Any = model.config
    roles = find_roles(model, structure, trace)
    try:
        proposals = propose_uses(model, structure, roles, trace)
    except ValueError as error:  # a spec refuses sizes that its operator cannot have
        problem = Problem("operator-impossible", "one of the model's operators cannot be", str(error))
        blame(problem, error, built, config)
        raise problem from error
    owners = owner_of_operations(trace, proposals)
    eager_costs(proposals.uses, trace, owners, lambda op: _repeats(roles, op))
    blocks, strip = _blocks(roles, trace)
    census = count_parameters(model, built, roles)
    embedding = embedding_of(model)
    repaired = [repair.words for repair in repairs]
    warnings = [*repaired, *traced.notes, *trace.notes, *_warnings(built, model, trace), *proposals.warnings]
    if census.not_built and not prediction_layers(built, roles):
        warnings.append(
            "one multi-token prediction layer is counted: the configuration does not say how many there are"
        )
    architecture = Architecture(
        name=name or str(config.get("model_type", "")),
        model_type=str(built.model_type),
        class_name=type(model).__name__,
        sequence_length=trace.tokens,
        hidden_size=int(getattr(structure.text_config, "hidden_size", None) or embedding.shape[-1]),
        vocab_size=int(embedding.shape[0]),
        num_layers=len(structure.layers),
        strip=strip,
        blocks=blocks,
        census=census,
        graph=_graph(roles, trace, owners, {i: b.letter for b in blocks for i in b.layers}),
        uses=proposals.uses,
        modality=_modality(census.by_role),
        warnings=list(dict.fromkeys(warnings)),
        novel=proposals.novel,
        memory=estimate_memory(model, roles, trace),
        growth=_growth(roles, trace),
        without_gradient=trace.without_gradient,
    )
    return Parsed(architecture=architecture, model=model, config=built, structure=structure, roles=roles, trace=trace)


@dataclass(frozen=True, kw_only=True)
class _Traced:
    model: Any
    notes: list[str]
    structure: Structure
    trace: Trace


def trace_with_repairs(
    config: dict[str, Any], *, tokens: int, assume: bool
) -> tuple[_Traced, dict[str, Any], list[Repair]]:
    """Build and trace a configuration, with what its class leaves unset filled in; see :func:`with_repairs`.

    A tower that does not run is repaired too where that is possible; the rest counts without it.
    """
    found = with_repairs(config, partial(_traced, tokens=tokens), assume=assume)
    if found[0].trace.tower_failure is None:
        return found
    try:
        traced, repaired, more = with_repairs(found[1], partial(_traced, tokens=tokens, tower=True), assume=assume)
    except Problem:
        return found
    return traced, repaired, [*found[2], *more]


def _traced(config: dict[str, Any], state: Attempt, *, tokens: int, tower: bool = False) -> _Traced:
    """Build and trace; a failure carries what was read up to it. ``tower``: one of the tower counts as a failure."""
    try:
        traced = _traced_in(config, state, tokens, torch.bfloat16)
    except Problem as problem:
        if problem.kind != "model-not-traced" or not _WRONG_DTYPE.search(str(problem.__cause__)):
            raise
        traced = _traced_in(config, state, tokens, torch.float32)
        traced.notes.append("the class does not run in bfloat16: it was traced in float32")
    if tower and traced.trace.tower_failure is not None:
        raise Problem("tower-not-traced", "the vision tower does not run") from traced.trace.tower_failure
    return traced


_WRONG_DTYPE = re.compile(r"expected scalar type|same dtype|dtypes? (do not|don't) match|must have the same dtype")


def _traced_in(config: dict[str, Any], state: Attempt, tokens: int, dtype: torch.dtype) -> _Traced:
    state.config = build_config(config)
    model, mode, notes = build_model(state.config, dtype)
    try:
        structure = find_structure(model, model.config)
    except LookupError as error:
        raise Problem(
            "no-decoder-layers", f"{type(model).__name__}: {error}", "only layered decoders are onboarded"
        ) from None
    try:
        trace = trace_model(model, mode, structure, tokens)
        if not trace.backward:  # a reversible stack runs every layer again in its backward: none can be left out
            alone = replace(structure, kinds=tuple(Kind(layers=(i,)) for i in range(len(structure.layers))))
            again = trace_model(model, mode, alone, tokens)
            structure, trace = (alone, again) if again.backward else (structure, trace)
    except Problem as problem:
        problem.extra["partial"] = {
            "class_name": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": len(structure.layers),
            "kinds": [list(kind.layers) for kind in structure.kinds],
        }
        raise
    return _Traced(model=model, notes=notes, structure=structure, trace=trace)


def _block_growth(roles: ModelRoles, trace: Trace) -> dict[int, Growth]:
    """First layer of a kind -> how its forward FLOPs grow."""
    if trace.shorter is None:
        return {}

    def place(operation: Operation) -> tuple[int | None, str, str]:
        return roles.layer_of(operation.path), operation.path, operation.name

    short, long = (totals((op for op in t.operations if op.phase == "forward"), place) for t in (trace.shorter, trace))
    found: dict[int, list[Growth]] = defaultdict(list)
    for (index, *_), one in laws_of(short, long, trace.tokens).items():
        if index is not None:
            found[index].append(one)
    return {index: add(laws) for index, laws in found.items()}


def _growth(roles: ModelRoles, trace: Trace) -> Growth | None:
    """FLOPs of a whole step: each place's law, times the layers that are alike."""
    if trace.shorter is None:
        return None

    def place(operation: Operation) -> tuple[str, str, str, int]:
        return operation.path, operation.name, operation.phase, _repeats(roles, operation)

    laws = laws_of(totals(trace.shorter.operations, place), totals(trace.operations, place), trace.tokens)
    return add(scale(one, key[-1]) for key, one in laws.items())


def _modality(by_role: dict[str, int]) -> str:
    extra = [word for role, word in ((VISION, "image"), (AUDIO, "audio")) if by_role.get(role)]
    return " + ".join(["text", *extra])


def _repeats(roles: ModelRoles, operation: Operation) -> int:
    """How often a traced operation happens in the whole model."""
    index = roles.layer_of(operation.path)
    return 1 if index is None else len(roles.structure.kind_of(index).layers)


def owner_of_operations(trace: Trace, proposals: Proposals) -> list[str]:
    """For each operation the digest of the operator spec that it is a part of, or an empty text."""
    families = {use.digest: use.spec["family"] for use in proposals.uses}
    owners = []
    for operation in trace.operations:
        if operation.leaf is not None:
            owners.append(proposals.leaf_owner.get((operation.path, operation.leaf.kind), ""))
            continue
        digest, path = "", operation.path
        while path and not digest:
            digest = proposals.owner.get(path, "")
            projects = families.get(digest) in ("gated_activation", "routing")
            projects |= families.get(digest) == "indexer" and path != operation.path
            if projects and operation.matmul:
                digest = ""  # the projections stay torch's
            path = path.rpartition(".")[0]
        # what the whole model's own forward does is its loss
        owners.append(digest or ("" if operation.path else proposals.owner.get("", "")))
    return owners


def _blocks(roles: ModelRoles, trace: Trace) -> tuple[list[BlockKind], str]:
    structure = roles.structure
    mixers = kind_mixers(roles)
    letters = letters_for(list(mixers.values()))
    totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for operation in trace.operations:
        index = roles.layer_of(operation.path)
        if index is not None and operation.phase == "forward":
            totals[index][0] += operation.flops
            totals[index][1] += operation.bytes_moved
    growth = _block_growth(roles, trace)
    blocks = []
    strip = [""] * len(structure.layers)
    for kind in structure.kinds:
        known = roles.by_kind[kind.first]
        parameters, active = block_parameters(roles, kind.first)
        called = [leaf for leaves in known.mixers.values() for leaf in leaves]
        words = mixers[kind.first]
        for index in kind.layers:
            strip[index] = letters[words]
        blocks.append(
            BlockKind(
                letter=letters[words],
                mixer=words,
                feed_forward=feed_forward_words(structure.layers[kind.first], known),
                layers=list(kind.layers),
                parameters=parameters,
                active_parameters=active,
                flops=totals[kind.first][0],
                bytes_moved=totals[kind.first][1],
                sequence_dependent=any(leaf.kind in ("linear_attention", "state_space", "scan") for leaf in called)
                or any(known.kernels.values()),
                growth=growth.get(kind.first),
                sparse_memory_access=bool(known.experts) or any(leaf.facts.get("top_k") for leaf in called),
            )
        )
    return blocks, "".join(strip)


def _graph(roles: ModelRoles, trace: Trace, owners: list[str], letters: dict[int, str]) -> list[GraphOperator]:
    rows: dict[tuple[Any, ...], list[float]] = {}
    for operation, owner in zip(trace.operations, owners, strict=True):
        index = roles.layer_of(operation.path)
        repeats = _repeats(roles, operation)
        key = (
            operation.name,
            _shapes(operation.shapes),
            roles.role(operation.path),
            "" if index is None else letters[index],
            operation.phase,
            owner,
            operation.matmul,
            attention_of(operation),
        )
        row = rows.setdefault(key, [0.0, 0.0, 0.0])
        row[0] += repeats
        row[1] += repeats * operation.flops
        row[2] += repeats * operation.bytes_moved
    return [
        GraphOperator(
            name=key[0],
            shapes=key[1],
            role=key[2],
            block=key[3],
            phase=key[4],
            use=key[5],
            matmul=key[6],
            attention=key[7],
            count=int(count),
            flops=flops,
            bytes_moved=moved,
        )
        for key, (count, flops, moved) in rows.items()
    ]


def attention_of(operation: Operation) -> Attention | None:
    """How an attention is run; None for other operators."""
    if operation.leaf is None or operation.leaf.kind != "attention":
        return None
    facts = operation.leaf.facts
    plain = facts["plain"][operation.phase] if "plain" in facts else None
    names = ("implementation", "causal", "mask", "window", "top_k", "softcap", "sinks")
    cost = {n: getattr(plain, n) for n in ("operators", "flops", "bytes_moved")} if plain else {}
    return Attention(**{name: facts[name] for name in names}, **cost)


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    shown = [("x".join(map(str, shape)) or "1") for shape in shapes[:SHOWN_TENSORS]]
    return ", ".join([*shown, *(["..."] if len(shapes) > SHOWN_TENSORS else [])])


def _warnings(config: Any, model: nn.Module, trace: Trace) -> list[str]:
    notes = []
    text = config.get_text_config()
    if getattr(text, "router_aux_loss_coef", None) and not getattr(text, "output_router_logits", False):
        notes.append("the auxiliary router loss has a coefficient but is off (output_router_logits is false)")
    if not trace.backward:
        notes.append("only the forward graph is known")
    dropout = Counter(type(m).__name__ for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0)
    if dropout:
        notes.append("dropout is on in the published configuration")
    return notes
