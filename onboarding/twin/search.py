"""Derive the twin's config from any transformers config: propose sizes and layers, then prove them by running."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import nn

from onboarding.problem import Problem
from onboarding.stages.parse.repair import Attempt, with_repairs
from onboarding.stages.parse.structure import embedding_of
from onboarding.twin import layers, models, shrink
from onboarding.twin.plan import TwinPlan

TOWER_LAYERS = 2


def derive(
    config: dict[str, Any], *, layers_at_least: int = 1, sequence_length: int = 64, assume: bool = False
) -> TwinPlan:
    """The smallest twin that holds every block kind of the published model and that runs forward and backward.

    The full model is built on the meta device (no memory) to learn the kinds of its layers. Sizes are proposed by the
    rules of :mod:`onboarding.twin.shrink`; a proposal counts only when the twin's layers have exactly the kinds they
    stand for and a trial step gives a finite loss.

    Args:
        config: the published ``config.json``; nested text and vision configs too.
        layers_at_least: lower bound of the depth (never more than the model has).
        sequence_length: tokens that the twin will see; windows and chunks are cut to a quarter of it.
        assume: give round sizes to counts that nothing determines, see :mod:`onboarding.stages.parse.repair`.

    Raises:
        Problem: ``twin-not-derived``, with every proposal's failure.
    """
    attempt = partial(_attempt, layers_at_least=layers_at_least, sequence_length=sequence_length)
    try:
        return with_repairs(config, partial(attempt, explain=False), assume=assume)[0]
    except Problem as problem:
        if problem.kind != "twin-not-derived":
            raise
    # what only a run shows: first one at the published size, whose sizes repairs are derived from
    repaired = repaired_config(config, assume=assume) or config
    return with_repairs(repaired, attempt, assume=assume)[0]


def repaired_config(config: dict[str, Any], *, assume: bool) -> dict[str, Any] | None:
    """The configuration with what its own trace needed filled in; None where that was nothing."""
    from onboarding.stages.parse.analyse import trace_with_repairs

    try:
        _, repaired, repairs = trace_with_repairs(config, tokens=512, assume=assume)
    except Problem:
        return None
    return repaired if repairs else None


def _attempt(
    config: dict[str, Any], state: Attempt, *, layers_at_least: int, sequence_length: int, explain: bool = True
) -> TwinPlan:
    """Search on one configuration; ``explain`` hands on the first proposal's exception, from which repairs are read."""
    full, published = _full(config, state)
    failures, raised = list[str](), list[Exception]()
    plan = _search(full, published, layers_at_least, sequence_length, failures, raised)
    text = models.text_of(full)
    if plan is None and text is not full and "model_type" in text.to_dict():
        # a class that cannot run without images still has a text model
        fields = {**models.fields_of(text), "model_type": text.model_type}
        try:
            part, model = _full(fields, Attempt())
        except Problem as problem:
            failures.append(f"its text model alone: {problem.title}")
        else:
            plan = _search(part, model, layers_at_least, sequence_length, failures, raised)
    if plan is None:
        state.config = None  # what the class reads and does not find is to be seen in the proposals' own configs
        raise Problem(
            "twin-not-derived",
            f"no small model with the layers of {config.get('model_type', 'this config')} could be built",
            "; ".join(failures),
        ) from (next(iter(raised), None) if explain else None)
    return plan


def _full(config: dict[str, Any], state: Attempt) -> tuple[Any, nn.Module]:
    """The published model without memory."""
    try:
        state.config = models.resolve(config)
        return state.config, models.on_meta(state.config)
    except Problem:
        raise
    except Exception as error:
        raise Problem("model-not-built", "the published model cannot be built", str(error)[:500]) from error


def _search(
    full: Any,
    published: Any,
    layers_at_least: int,
    sequence_length: int,
    failures: list[str],
    raised: list[Exception],
) -> TwinPlan | None:
    """The first proposal that holds, or None; why the others do not is appended to ``failures`` and ``raised``."""
    whole: Any = published.config  # of a composite config, the part that the class takes
    stack = models.stack_of(published)
    text, path = models.fields_of(stack), models.path_to(whole, stack) or ()
    architectures = {"architectures": [type(published).__name__]}
    known = models.with_implied_rope(published, models.fields_of(whole), path)
    per_layer = layers.per_layer_fields(text, len(layers.decoder_layers(published)[1]))
    all_kinds = layers.kinds(published, text, per_layer)
    factors = _depth_factors(whole, known, path, text, len(all_kinds))
    sizes_of = models.fields_of(stack, derived=True)
    sizes_of.setdefault("hidden_size", int(embedding_of(published).shape[-1]))
    for rule in shrink.rules_for(sizes_of, sequence_length):
        small = shrink.shrink(known, rule)
        for chosen in layers.selections(all_kinds, layers_at_least):
            fields = {**_cut(small, path, text, chosen, all_kinds), **architectures}
            fields = _with(fields, path, {k: len(chosen) // n for k, n in factors.items() if len(chosen) % n == 0})
            label = f"{'tied' if rule.tied else 'free'} sizes (heads / {rule.heads:g}), layers {chosen}"
            expected = [all_kinds[i] for i in chosen]

            def same_kinds(twin: Any, expected: list[layers.Kind] = expected) -> None:
                if layers.kinds(twin, models.stack_fields(twin), per_layer) != expected:
                    raise LookupError("its layers are of other kinds than the published ones")

            try:
                twin = models.trial(fields, sequence_length, same_kinds)
            except Exception as error:  # any construction or shape error only rules this proposal out
                failures.append(f"{label}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
                if not isinstance(error, LookupError):
                    raised.append(error)
                continue
            sizes = _sizes(models.stack_fields(twin), twin, sequence_length)
            return TwinPlan(config=fields, class_name=type(twin).__name__, layers=tuple(chosen), sizes=sizes)
    return None


def _depth_factors(
    config: Any, fields: dict[str, Any], path: tuple[str, ...], text: dict[str, Any], depth: int
) -> dict[str, int]:
    """Where no field counts the layers: one that does in steps, and the layers of a step (``rounds`` of two each).

    Found by building the model with one of it.
    """
    if any(shrink.DEPTH.search(k) and isinstance(v, int) and v and v % depth == 0 for k, v in text.items()):
        return {}
    if layers.per_layer_fields(text, depth) or layers.sections(text, depth):
        return {}
    numbers = {k: v for k, v in text.items() if isinstance(v, int) and not isinstance(v, bool)}
    candidates = [k for k, v in numbers.items() if v > 1 and depth % v == 0 and not shrink.known(k)]
    for name in sorted(candidates, key=lambda k: -numbers[k]):
        changed = {
            **_with(fields, path, {name: 1}),
            "architectures": list(getattr(config, "architectures", None) or []),
        }
        try:
            count = len(layers.decoder_layers(models.on_meta(models.resolve(changed)))[1])
        except Exception:  # it means something else
            continue
        if count * numbers[name] == depth:
            return {name: count}
    return {}


def _with(fields: dict[str, Any], path: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Fields of a nested config set."""
    if not path:
        return {**fields, **values}
    return {**fields, path[0]: _with(fields[path[0]], path[1:], values)}


def _cut(
    small: dict[str, Any], path: tuple[str, ...], text: dict[str, Any], chosen: list[int], all_kinds: list[layers.Kind]
) -> dict[str, Any]:
    """Cut the depth of the language model's fields, wherever they are nested, and keep its initial scale.

    Linear layers keep the published spread of their pre-activations: std x sqrt(width) stays what it was.
    """
    if path:
        inner = _cut(small[path[0]], path[1:], text, chosen, all_kinds)
        others = {k: _shallow(v) if isinstance(v, dict) and _is_tower(v) else v for k, v in small.items()}
        return _reselected({**others, path[0]: inner})
    cut = layers.with_layers(small, chosen, len(all_kinds), all_kinds)
    before, after = text.get("hidden_size"), small.get("hidden_size")
    if isinstance(cut.get("initializer_range"), float) and before and after:
        cut["initializer_range"] = cut["initializer_range"] * math.sqrt(before / after)
    return cut


def _reselected(fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a tower's layers that are read, kept within the layers that it has left."""

    def within(value: Any) -> Any:
        if isinstance(value, list):
            return [within(v) for v in value]
        plain = isinstance(value, int) and not isinstance(value, bool)
        return max(-TOWER_LAYERS, min(value, TOWER_LAYERS - 1)) if plain else value

    return {
        k: _reselected(v) if isinstance(v, dict) else within(v) if shrink.SELECTED.search(k) else v
        for k, v in fields.items()
    }


def _is_tower(part: dict[str, Any]) -> bool:
    return "model_type" in part and any(shrink.DEPTH.search(key) for key in part)


def _shallow(tower: dict[str, Any]) -> dict[str, Any]:
    """A tower of few layers: the twin reads text only, the tower is there to be built and saved."""
    depth = next((v for k, v in tower.items() if shrink.DEPTH.search(k) and isinstance(v, int)), 0)
    return layers.with_layers(tower, list(range(min(TOWER_LAYERS, depth))), depth) if depth else tower


def _sizes(fields: dict[str, Any], twin: Any, sequence_length: int) -> dict[str, int | str]:
    names = {
        "hidden": ("hidden_size", "d_model", "n_embd"),
        "heads": ("num_attention_heads", "num_heads", "n_head"),
        "key_value_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim", "v_head_dim"),
        "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
        "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    }
    sizes: dict[str, int | str] = {"layers": len(layers.decoder_layers(twin)[1])}
    for size, candidates in names.items():
        value = next((fields[n] for n in candidates if isinstance(fields.get(n), int) and fields[n] > 0), None)
        if value is not None:
            sizes[size] = value
    sizes["vocabulary"] = int(fields.get("vocab_size", 0))
    sizes["parameters"] = sum(p.numel() for p in twin.parameters())
    sizes["sequence_length"] = sequence_length
    return sizes
