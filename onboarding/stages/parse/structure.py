"""Where a model's decoder layers are, which of them are alike, and what each module is for: read off its structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onboarding.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Decoder layers with the same modules, shapes and settings."""

    layers: tuple[int, ...]

    @property
    def first(self) -> int:
        """The layer that is traced for all."""
        return self.layers[0]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The parts of a language model."""

    prefix: str
    """Name of the layer list in the model, e.g. ``model.layers``."""
    layers: nn.ModuleList
    kinds: tuple[Kind, ...]
    text_config: Any
    decoder_prefix: str
    """Name of the module that owns the layers, e.g. ``model`` or ``model.language_model``."""
    names: dict[int, str] = field(default_factory=dict)
    """id(module) -> its first name in the model."""

    def kind_of(self, layer: int) -> Kind:
        """The kind that a layer belongs to."""
        return next(kind for kind in self.kinds if layer in kind.layers)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def signature(module: nn.Module, positional: set[str]) -> tuple[Any, ...]:
    """What makes two layers alike: classes, parameter shapes and scalar settings of every module inside.

    Attributes in ``positional`` (``layer_idx`` and the like) differ in every layer without changing what it computes.
    """
    parts: list[Any] = []
    for name, child in module.named_modules():
        shapes = tuple((n, tuple(p.shape), str(p.dtype)) for n, p in child.named_parameters(recurse=False))
        settings = tuple(
            sorted(
                (key, repr(value))
                for key, value in vars(child).items()
                if _plain(value) and not key.startswith("_") and key not in positional
            )
        )
        parts.append((name, type(child).__qualname__, shapes, settings))
    return tuple(parts)


def _position_names(layers: nn.ModuleList) -> set[str]:
    """Attribute names that hold the layer's position (``layer_idx``, ``layer_id`` ...), found by their values."""
    names: set[str] | None = None
    if len(layers) < 2:
        return {"layer_idx"}
    for index, layer in enumerate(layers):
        here = {
            key
            for child in layer.modules()
            for key, value in vars(child).items()
            if isinstance(value, int) and not isinstance(value, bool) and value == index
        }
        names = here if names is None else names & here
    return (names or set()) | {"layer_idx"}


def find_layers(model: Any, config: Any) -> tuple[str, nn.ModuleList]:
    """The decoder's list of layers: as long as the configuration says, in the text part, holding most parameters.

    Raises:
        LookupError: the model has no list of layers.
    """
    text = config.get_text_config()
    wanted = getattr(text, "num_hidden_layers", None)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(m) for m in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    best: tuple[tuple[bool, bool, bool, int], str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        outermost = not any(name.startswith(other + ".") for other in lists)
        size = sum(p.numel() for p in module.parameters())
        rank = (id(module) in inside, outermost, len(module) == wanted, size)
        if best is None or rank > best[0]:
            best = (rank, name, module)
    if best is None:
        raise LookupError("the model has no list of layers")
    return best[1], best[2]


def embedding_of(model: Any) -> torch.Tensor:
    """The token embedding's weight [vocabulary, width]; the widest embedding where the class does not name it."""
    try:
        named: torch.Tensor = model.get_input_embeddings().weight
        return named
    except (AttributeError, NotImplementedError):
        found = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    if not found:
        raise Problem(
            "no-embedding", f"{type(model).__name__} has no token embedding", "only language models are onboarded"
        )
    return max(found, key=lambda weight: weight.shape[0])


def find_structure(model: Any, config: Any) -> Structure:
    """Find the decoder layers and group them by kind, in order of first appearance.

    Raises:
        LookupError: the model has no list of layers.
    """
    prefix, layers = find_layers(model, config)
    positional = _position_names(layers)
    text = config.get_text_config()
    groups: dict[Any, list[int]] = {}
    schedules = [
        value
        for value in vars(text).values()
        if isinstance(value, list | tuple)
        and len(value) == len(layers)
        and all(_plain(v) for v in value)
        # a list of layer numbers says nothing of any one layer
        and not (
            len(value) > 1
            and sorted(map(repr, value))
            == sorted(map(repr, range(value[0] if isinstance(value[0], int) else 0, len(value))))
        )
    ]
    for index, layer in enumerate(layers):
        scheduled = tuple(repr(values[index]) for values in schedules)
        groups.setdefault((scheduled, signature(layer, positional)), []).append(index)
    return Structure(
        prefix=prefix,
        layers=layers,
        kinds=tuple(Kind(layers=tuple(members)) for members in groups.values()),
        text_config=text,
        decoder_prefix=prefix.rpartition(".")[0],
        names=_first_names(model),
    )


def _first_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    return names
