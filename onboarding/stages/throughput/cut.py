"""The widest slice of a published model that fits a device: its full width, fewer layers, every kind kept."""

from __future__ import annotations

from typing import Any

from onboarding.problem import Problem
from onboarding.twin import layers, models, shrink
from onboarding.twin.plan import TwinPlan

MOST_LAYERS = 4
"""A slice is for measuring layers: more of the same would take time and tell nothing."""
ROOM = 0.6
"""Share of the device's memory for weights; the rest is for activations, adapters and logits."""


def cut(config: dict[str, Any], memory_bytes: int, *, itemsize: int = 2, most_layers: int = MOST_LAYERS) -> TwinPlan:
    """Choose layers, and where even one of each kind is too large fewer experts, as an expert-parallel rank holds.

    Args:
        config: the published configuration.
        memory_bytes: of the device.
        itemsize: bytes of a weight.
        most_layers: upper bound, unless the kinds alone need more.

    Raises:
        Problem: ``slice-too-large`` if nothing fits.
    """
    full = models.resolve(config)
    published: Any = models.on_meta(full)
    whole: Any = published.config
    text, path = models.text_fields(whole), models.text_path(whole)
    fields = models.fields_of(whole)
    depth = len(layers.decoder_layers(published)[1])
    per_layer = layers.per_layer_fields(text, depth)
    kinds = layers.kinds(published, text, per_layer)
    options = layers.selections(kinds, min(most_layers, depth)) + layers.selections(kinds, 1)
    failures: list[str] = []
    for share in (1, 2, 4, 8, 16, 32):
        for chosen in sorted(
            (o for o in options if len(o) <= max(most_layers, len(set(kinds)))), key=len, reverse=True
        ):
            part = _fewer_experts(_cut_at(fields, path, chosen, depth), share)
            part["architectures"] = [type(published).__name__]
            try:
                model = models.on_meta(models.resolve(part))
                found = layers.kinds(model, models.text_fields(model.config), per_layer)
            except Exception as error:  # a cut that the class does not accept rules itself out
                failures.append(f"layers {chosen}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if found != [kinds[i] for i in chosen]:
                failures.append(f"layers {chosen}: other kinds than the published ones")
                continue
            needed = itemsize * sum(p.numel() for p in model.parameters())
            if needed > ROOM * memory_bytes:
                failures.append(f"layers {chosen}, 1/{share} of the experts: {needed / 2**30:.1f} GiB of weights")
                continue
            sizes: dict[str, int | str] = {"layers": len(chosen), "hidden": int(text.get("hidden_size", 0))}
            sizes["parameters"] = needed // itemsize
            if share > 1:
                sizes["experts"] = f"1/{share} of the published number"
            return TwinPlan(config=part, class_name=type(model).__name__, layers=tuple(chosen), sizes=sizes)
        if not any(shrink.EXPERT_COUNT.search(name) for name in text):
            break
    raise Problem("slice-too-large", "no slice of the published width fits this device", "; ".join(failures[-6:]))


def _cut_at(fields: dict[str, Any], path: tuple[str, ...], chosen: list[int], depth: int) -> dict[str, Any]:
    """Cut the depth of the language model's fields, wherever they are nested."""
    if not path:
        return layers.with_layers(fields, chosen, depth)
    return {**fields, path[0]: _cut_at(fields[path[0]], path[1:], chosen, depth)}


def _fewer_experts(fields: dict[str, Any], share: int) -> dict[str, Any]:
    """Every expert count divided; never below what a token chooses, groups kept whole."""
    if share == 1:
        return dict(fields)
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            made[name] = _fewer_experts(value, share)
        elif shrink.EXPERT_COUNT.search(name) and isinstance(value, int) and value > 1:
            top = max(
                (v for k, v in fields.items() if shrink.EXPERTS_TOP_K.search(k) and isinstance(v, int)), default=1
            )
            groups = next((v for k, v in fields.items() if shrink.EXPERT_GROUPS.search(k) and isinstance(v, int)), 1)
            made[name] = max(value // share // max(groups, 1) * max(groups, 1), 2 * max(groups, 1), top)
        else:
            made[name] = value
    return made
