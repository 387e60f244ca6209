"""Names that modeling code written for earlier transformers imports and that this one no longer has.

Only what training needs is here: masks are built as they were, caches exist as types, switches say no.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, TypedDict


def install() -> None:
    """Add the missing names to the installed transformers, in this process."""
    import transformers
    from transformers import cache_utils, modeling_rope_utils, modeling_utils, utils
    from transformers.utils import import_utils

    from onboarding.custom_code import masks

    class LossKwargs(TypedDict, total=False):
        """Was a type of keyword arguments."""

        num_items_in_batch: int | None

    def no() -> bool:
        return False

    for module in (utils, import_utils):
        _add(module, "is_torch_fx_available", no)
    _add(utils, "LossKwargs", LossKwargs)
    _add(modeling_utils, "is_flash_attn_2_available", no)
    for name in ("HybridCache", "SinkCache"):
        _add(cache_utils, name, type(name, (cache_utils.DynamicCache,), {}))
        _add(transformers, name, getattr(cache_utils, name))
    _add(cache_utils.Cache, "get_usable_length", _usable_length)
    _add(cache_utils.DynamicCache, "from_legacy_cache", classmethod(lambda cls, past=None: cls()))
    _add(cache_utils.DynamicCache, "to_legacy_cache", lambda self: self)
    sys.modules.setdefault("transformers.modeling_attn_mask_utils", masks)
    if "default" not in modeling_rope_utils.ROPE_INIT_FUNCTIONS:
        modeling_rope_utils.ROPE_INIT_FUNCTIONS["default"] = default_rope


def _add(owner: Any, name: str, value: Any) -> None:
    """Set a name unless it is there; transformers' lazy modules answer ``hasattr`` themselves."""
    if not hasattr(owner, name):
        setattr(owner, name, value)
        if isinstance(owner, ModuleType) and hasattr(owner, "_objects"):
            owner._objects[name] = value


def _usable_length(self: Any, new_length: int, layer_idx: int | None = 0) -> int:
    return int(self.get_seq_length(layer_idx))


def default_rope(config: Any = None, device: Any = None, seq_len: int | None = None, **_: Any) -> tuple[Any, float]:
    """The plain rotary frequencies, theta^(-2i/d), and the scale 1."""
    import torch

    parameters = getattr(config, "rope_parameters", None) or {}
    base = parameters.get("rope_theta", getattr(config, "rope_theta", 10_000.0))
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head * partial)
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)), 1.0


def adapt_class(model: Any) -> None:
    """Bring class attributes of the older convention into today's, in place."""
    for cls in model.__mro__:
        tied = vars(cls).get("_tied_weights_keys")
        if isinstance(tied, list | tuple | set):
            cls._tied_weights_keys = _TiedNames(tuple(tied))


class _TiedNames:
    """``_tied_weights_keys`` was a list of names that follow the input embedding; it is a mapping to their source."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __get__(self, model: Any, owner: Any = None) -> dict[str, str]:
        embedding = model.get_input_embeddings() if model is not None else None
        sources = (
            (name for name, module in model.named_modules() if module is embedding) if embedding is not None else ()
        )
        source = next(iter(sources), None)
        return {} if source is None else {name: f"{source}.weight" for name in self.names if name != f"{source}.weight"}
