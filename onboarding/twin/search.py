"""Derive the twin's config from any transformers config: propose sizes and layers, then prove them by running."""

from __future__ import annotations

import math
from typing import Any

from onboarding.problem import Problem
from onboarding.twin import layers, models, shrink
from onboarding.twin.plan import TwinPlan

TRIAL_TOKENS = 16
"""Sequence length of the step that a proposal must survive."""


def derive(config: dict[str, Any], *, layers_at_least: int = 1, sequence_length: int = 64) -> TwinPlan:
    """The smallest twin that holds every block kind of the published model and that runs forward and backward.

    The full model is built on the meta device (no memory) to learn the kinds of its layers. Sizes are proposed by the
    rules of :mod:`onboarding.twin.shrink`; a proposal counts only when the twin's layers have exactly the kinds they
    stand for and a trial step gives a finite loss.

    Args:
        config: the published ``config.json``; nested text and vision configs too.
        layers_at_least: lower bound of the depth (never more than the model has).
        sequence_length: tokens that the twin will see; windows and chunks are cut to a quarter of it.

    Raises:
        Problem: ``twin-not-derived``, with every proposal's failure.
    """
    failures: list[str] = []
    candidates = [config]
    if isinstance(config.get("text_config"), dict) and "model_type" in config["text_config"]:
        candidates.append(config["text_config"])  # a class that cannot run without images still has a text model
    for candidate in candidates:
        plan = _search(candidate, layers_at_least, sequence_length, failures)
        if plan is not None:
            return plan
    raise Problem(
        "twin-not-derived",
        f"no small model with the layers of {config.get('model_type', 'this config')} could be built",
        "; ".join(failures),
    )


def _search(config: dict[str, Any], layers_at_least: int, sequence_length: int, failures: list[str]) -> TwinPlan | None:
    """The first proposal that holds, or None; why the others do not is appended to ``failures``."""
    full = models.resolve(config)
    text = models.text_fields(full)
    published = models.on_meta(full)
    per_layer = layers.per_layer_fields(text, len(layers.decoder_layers(published)[1]))
    all_kinds = layers.kinds(published, text, per_layer)
    for rule in shrink.rules_for(text, sequence_length):
        small = shrink.shrink(models.fields_of(full), rule)
        for chosen in layers.selections(all_kinds, layers_at_least):
            fields = _cut(small, text, chosen, len(all_kinds))
            label = f"{'tied' if rule.tied else 'free'} sizes (heads / {rule.heads:g}), layers {chosen}"
            try:
                twin = models.trial(fields, TRIAL_TOKENS)
            except Exception as error:  # any construction or shape error only rules this proposal out
                failures.append(f"{label}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                continue
            if layers.kinds(twin, models.text_fields(twin.config), per_layer) != [all_kinds[i] for i in chosen]:
                failures.append(f"{label}: its layers are of other kinds than the published ones")
                continue
            sizes = _sizes(models.text_fields(twin.config), twin, sequence_length)
            return TwinPlan(config=fields, class_name=type(twin).__name__, layers=tuple(chosen), sizes=sizes)
    return None


def _cut(small: dict[str, Any], text: dict[str, Any], chosen: list[int], depth: int) -> dict[str, Any]:
    """Cut the depth of the language model's fields, wherever they are nested, and keep its initial scale.

    Linear layers keep the published spread of their pre-activations: std x sqrt(width) stays what it was.
    """
    nested = "text_config" if isinstance(small.get("text_config"), dict) else None
    target = small[nested] if nested else small
    cut = layers.with_layers(target, chosen, depth)
    before, after = text.get("hidden_size"), target.get("hidden_size")
    if isinstance(cut.get("initializer_range"), float) and before and after:
        cut["initializer_range"] = cut["initializer_range"] * math.sqrt(before / after)
    fields = {**small, nested: cut} if nested else cut
    for key, value in fields.items():
        if isinstance(value, dict) and "vision" in key:
            fields[key] = _shallow(value)
    return fields


def _shallow(tower: dict[str, Any]) -> dict[str, Any]:
    """A tower of two layers: the twin reads text only, the tower is there to be built and saved."""
    depth = next((v for k, v in tower.items() if shrink.DEPTH.search(k) and isinstance(v, int)), 0)
    return layers.with_layers(tower, list(range(min(2, depth))), depth) if depth else tower


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
