"""Safetensors into a model that is already sharded: one parameter's sources at a time, every parameter proven loaded.

Names are matched by transformers' own conversion rules (experts stored one by one become one tensor, old names become
new ones). A rank reads its own slice of a parameter, and of experts stored one by one only its own, so that host memory
holds one parameter at a time and never the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.parallel.placement import local_part, local_tensor
from runtime.refusal import Refused

SCALES = ("_scale_inv", "_scale")
BLOCK = 128
"""Rows and columns that share one scale in block-quantised FP8 checkpoints."""
INDEX = "model.safetensors.index.json"


class Shards:
    """The tensors of a folder of safetensors, by name; headers are read at once, values when asked for.

    Raises:
        Refused: ``weights-missing``, ``weights-shard-missing``, ``weights-broken``.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        files = _files(folder)
        self._where: dict[str, Any] = {}
        for path in files:
            try:
                handle: Any = safe_open(str(path), "pt")
            except (SafetensorError, OSError) as error:
                raise Refused("weights-broken", f"{path} is damaged", f"fetch the file again ({error})") from None
            for name in handle.keys():  # noqa: SIM118  # a handle is no mapping
                self._where[name] = handle

    def names(self) -> list[str]:
        """Of all tensors but the scales of quantised ones."""
        return [n for n in self._where if not self._is_scale(n)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading values."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Values on the CPU; block-quantised FP8 comes out in float32.

        Raises:
            Refused: ``weights-quantised`` for a format that is not known.
        """
        value: Tensor = self._where[name].get_tensor(name)
        scale = next((name + s for s in SCALES if name + s in self._where), None)
        if scale is not None:
            return _dequantised(name, value, self._where[scale].get_tensor(scale).float())
        if not value.is_floating_point() and value.dtype in (torch.uint8, torch.int8) and value.ndim > 1:
            advice = "dequantise the weights first, or take the published ones in bfloat16"
            raise Refused("weights-quantised", f"{name} holds {value.dtype} blocks of an unknown format", advice)
        return value

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """One part of a tensor; nothing else is read from the file where the format allows it."""
        if not part or any(name + s in self._where for s in SCALES):
            return self.read(name)[part]
        if any(s.start == s.stop for s in part):
            return torch.empty([s.stop - s.start for s in part])
        value: Tensor = self._where[name].get_slice(name)[part]
        return value

    def _is_scale(self, name: str) -> bool:
        return any(name.endswith(s) and name.removesuffix(s) in self._where for s in SCALES)


class Values:
    """Tensors that are in memory already, behind the same face as :class:`Shards`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """One part of a tensor."""
        return self._tensors[name][part]


@dataclass(kw_only=True)
class Piece:
    """What one or several parameters are made of."""

    rule: Any
    """transformers' transform, which converts; None for a tensor that is taken as it is."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(pattern, name in the checkpoint), in the order of the checkpoint's numbers."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """For each target the way to it, found from names and shapes alone."""

    pieces: dict[str, Piece]
    """By the name of the (first) target."""
    unused: list[str]
    """Tensors of the checkpoint that the model has no place for."""


def plan_load(model: nn.Module, source: Shards | Values) -> LoadPlan:
    """Match the checkpoint with the model, on the meta device, before anything is sharded or any device is touched.

    Args:
        model: plain, with the names that its class gives.
        source: names and shapes.

    Raises:
        Refused: ``weights-of-another-model``: nothing or too little fits, or a shape differs.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = model.state_dict()
    rules = [] if isinstance(source, Values) else _rules(model)
    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    pieces: dict[str, Piece] = {}
    unused: list[str] = []
    for name in sorted(source.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            unused.append(name)
            continue
        rule = deepcopy(by_pattern[pattern]) if pattern is not None else None
        piece = pieces.setdefault(target, Piece(rule=rule))
        piece.sources.append((pattern or name, name))
        if rule is None and source.shape(name) != tuple(state[target].shape):
            detail = f"{target} is {tuple(state[target].shape)} in the model and {source.shape(name)} in the weights"
            raise Refused("weights-of-another-model", "the weights have other shapes than the model", detail)
    if not pieces:
        detail = (
            f"the weights hold {', '.join(source.names()[:3])} ...; the model wants {', '.join(list(state)[:3])} ..."
        )
        raise Refused("weights-of-another-model", "the weights fit none of the model's parameters", detail)
    _check_complete(model, {t for t, p in pieces.items() if p.rule is None}, pieces)
    return LoadPlan(pieces=pieces, unused=unused)


def load(
    model: nn.Module,
    source: Shards | Values,
    plan: LoadPlan,
    *,
    own: Sequence[str] = (),
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Fill the (sharded) parameters and stored buffers of ``model``.

    Args:
        model: materialised; parameter names may end differently only where ``own`` says so.
        source: the values.
        plan: from :func:`plan_load` on the plain model.
        own: parts of names that no checkpoint holds (adapters, counters).
        alive: called after every parameter, so that a long load is no hang.

    Raises:
        Refused: ``weights-incomplete`` with the parameters that were not filled.
    """
    places: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False)), **_stored_buffers(model)}
    filled: set[int] = set()
    for target, piece in plan.pieces.items():
        for name, value, part in _pieces(model, target, piece, source, places):
            if name not in places:
                detail = f"{name} comes out of {piece.sources[0][1]}, and the model has no such parameter"
                raise Refused("weights-incomplete", "the weights do not fit the model", detail)
            copy_into(places[name], value, part, name)
            filled.add(id(places[name]))
        alive()
    empty = [n for n, t in places.items() if id(t) not in filled and not any(part in n for part in own)]
    if empty:
        raise _incomplete(empty)


def copy_into(place: Tensor, value: Tensor, part: tuple[slice, ...], name: str) -> None:
    """Copy this rank's share into ``place``, which may be a DTensor.

    Args:
        place: a parameter or buffer.
        value: that part of the whole tensor that ``part`` says.
        part: one slice of the whole a dimension.
        name: for messages.

    Raises:
        Refused: ``weights-of-another-model`` for another shape.
    """
    whole = tuple(place.shape)
    expected = tuple(len(range(*s.indices(n))) for s, n in zip(part, whole, strict=True))
    if tuple(value.shape) != expected:
        detail = f"{name} is {whole} in the model and {tuple(value.shape)} of it came where {expected} were wanted"
        raise Refused("weights-of-another-model", "the weights have other shapes than the model", detail)
    own = tuple(slice(o.start - p.start, o.stop - p.start) for o, p in zip(local_part(place), part, strict=True))
    with torch.no_grad():
        local_tensor(place).copy_(value[own])


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device memory on ``device``, and move the rest there; ties stay ties."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                ties.setdefault(id(parameter), []).append((module, name))
    made: dict[int, Tensor] = {}

    def fresh(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        return made.setdefault(id(tensor), torch.empty_like(tensor, device=device))

    model._apply(fresh)  # type: ignore[no-untyped-call]
    for places in ties.values():
        first = getattr(*places[0])
        for module, name in places[1:]:
            if getattr(module, name) is not first:
                module._parameters[name] = first


def _pieces(
    model: nn.Module, target: str, piece: Piece, source: Shards | Values, places: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
    """Name, values, and the part of the whole that they are, of all parameters that one piece makes."""
    if piece.rule is None:
        part = local_part(places[target]) if target in places else ()
        yield target, source.read_part(piece.sources[-1][1], part), part
        return
    sources, first = _own_experts(piece, places.get(target))
    for pattern, name in sources:
        piece.rule.add_tensor(target, name, pattern, _Reader(source, name))
    config: Any = model.config
    for name, found in piece.rule.convert(target, model=model, config=config).items():
        value = found[0] if isinstance(found, list) else found
        part = tuple(slice(0, n) for n in value.shape)
        if first is not None:
            part = (first, *part[1:])
        yield name, value, part


def _own_experts(piece: Piece, place: Tensor | None) -> tuple[list[tuple[str, str]], slice | None]:
    """Of experts that are stored one by one and stacked, only those that this rank holds.

    Returns:
        The sources to read, and the experts that they are; all sources and None where experts are not stacked.
    """
    from transformers.core_model_loading import MergeModulelist

    by_pattern: dict[str, list[str]] = {}
    for pattern, name in piece.sources:
        by_pattern.setdefault(pattern, []).append(name)
    counts = {len(names) for names in by_pattern.values()}
    stacked = isinstance(piece.rule.operations[0], MergeModulelist) and piece.rule.operations[0].dim == 0
    if place is None or not stacked or counts != {place.shape[0]}:
        return piece.sources, None
    own = local_part(place)[0]
    return [(p, n) for p, names in by_pattern.items() for n in names[own]], own


class _Reader:
    """A tensor that is read when the conversion asks for it."""

    def __init__(self, source: Shards | Values, name: str) -> None:
        self.source, self.name = source, name

    def __call__(self) -> Tensor:
        return self.source.read(self.name)


def _rules(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules: list[Any] = get_model_conversion_mapping(model)
    return rules


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    stored = model.state_dict(keep_vars=True).keys()
    return {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in stored}


def _check_complete(model: nn.Module, exact: set[str], pieces: Mapping[str, Piece]) -> None:
    """Refuse early what is certainly missing: a target that nothing makes, where no conversion could still make it."""
    if any(p.rule is not None and len(p.rule.target_patterns) > 1 for p in pieces.values()):
        return  # one to many: known only after conversion
    state = model.state_dict(keep_vars=True)
    filled = {id(state[t]) for t in pieces}
    missing = [n for n, t in state.items() if id(t) not in filled]
    if missing:
        raise _incomplete(missing)


def _incomplete(missing: Iterable[str]) -> Refused:
    names = list(missing)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    detail = f"nothing fills {shown}; are all files of the checkpoint there, and is it this model's?"
    return Refused("weights-incomplete", f"{len(names)} of the model's parameters are not in the weights", detail)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise Refused("weights-broken", f"{index} is no index of weights", "fetch the file again") from None
        missing = [n for n in listed if not (folder / n).is_file()]
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            title = f"{len(missing)} of {len(listed)} weight files are missing in {folder}"
            raise Refused("weights-shard-missing", title, f"fetch {shown}", missing=missing)
        return [folder / n for n in listed]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        advice = "weights are safetensors; convert others with transformers' save_pretrained"
        raise Refused("weights-missing", f"no safetensors in {folder}", advice)
    return files


def _dequantised(name: str, value: Tensor, scale: Tensor) -> Tensor:
    """Values times the scale of their block (DeepSeek's FP8 layout), or times one scale a tensor."""
    wide = value.float()
    if scale.numel() == 1:
        return wide * scale.reshape(())
    if wide.ndim != 2 or scale.shape != (-(-wide.shape[0] // BLOCK), -(-wide.shape[1] // BLOCK)):
        advice = "dequantise the weights first, or take the published ones in bfloat16"
        detail = f"values {tuple(value.shape)}, scales {tuple(scale.shape)}; {advice}"
        raise Refused("weights-quantised", f"{name} is quantised in a way that is not known", detail)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide * spread[: wide.shape[0], : wide.shape[1]]
