"""Floating-point operations of training one token, block kind by block kind.

A weight matrix costs 2 x its elements a token forward (a routed expert's only on the share of tokens that it gets), and
what mixes tokens costs by its kind:

- attention over a context of c tokens on average: 2 c (d_query + d_value) a head, with c = (T + 1) / 2 for causal
  attention over rows of T tokens, and about the window where there is a shorter one;
- linear attention and state spaces: 4 d_key d_value a head to write the state and to read it (the recurrence; chunked
  kernels do a little more).

Backward costs twice the forward of what is trained; below a frozen weight only the half that passes gradients on.
Recomputation is not counted: this is model FLOP utilisation (PaLM, appendix B), not hardware utilisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from runtime.model import blocks, in_tower, text_config

PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Dense bfloat16 peaks of the makers' data sheets, by a part of the device's name; the first that fits counts."""
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
LINEAR = re.compile(r"delta|linear_?attention|mamba|ssm|kda|lightning|recurrent|retention|rwkv", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of one token."""

    forward: float
    training: float
    by_kind: dict[str, float]
    """Forward, by block kind and ``head``."""


def count(model: nn.Module, length: int) -> Flops:
    """Count a model; it may live on the meta device, plain and with its published names.

    Args:
        model: with the trained parameters marked.
        length: tokens of a row.
    """
    config = text_config(model)
    share = expert_share(config)
    by_kind: dict[str, float] = {}
    passed = 0.0
    trained = 0.0
    found = dict(blocks(model))
    inside = set()
    for number, (name, block) in enumerate(found.items()):
        kind, mixing = _mixing(config, block, number, length)
        weights = 0.0
        for inner, parameter in block.named_parameters():
            inside.add(f"{name}.{inner}")
            cost = _weight_cost(inner, parameter, share)
            weights += cost
            trained += cost if parameter.requires_grad else 0.0
        label = kind + (" + experts" if any(EXPERTS.search(n) for n, _ in block.named_modules()) else "")
        by_kind[label] = by_kind.get(label, 0.0) + weights + mixing
        passed += weights + 2 * mixing  # gradients of both factors of every product between activations
    head = model.get_output_embeddings()  # type: ignore[operator]
    cost = 2.0 * head.weight.numel() if head is not None else 0.0
    by_kind["head"] = cost
    passed += cost
    trained += cost if head is not None and head.weight.requires_grad else 0.0
    forward = sum(by_kind.values())
    return Flops(forward=forward, training=forward + passed + trained, by_kind=by_kind)


def peak_tflops(device_name: str) -> float:
    """Peak of a device by its name; 0 where it is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), 0.0)


def _weight_cost(name: str, parameter: nn.Parameter, expert_share: float) -> float:
    """Forward operations a token of one parameter; vectors count as nothing."""
    if parameter.ndim < 2 or in_tower(name):
        return 0.0
    if EXPERTS.search(name) and "shared" not in name:
        return 2.0 * parameter.numel() * expert_share
    return 2.0 * parameter.numel()


def expert_share(config: Any) -> float:
    """Share of the routed experts that one token goes to."""
    experts = _first(config, "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
    return chosen / experts if experts else 1.0


def _mixing(config: Any, block: nn.Module, number: int, length: int) -> tuple[str, float]:
    """Kind of a block's mixer, and its forward operations a token beyond weights."""
    for child in block.modules():
        if LINEAR.search(type(child).__name__):
            return "linear attention", 4.0 * _state_size(config, child)
    heads = _first(config, "num_attention_heads", "n_head")
    if not heads:
        return "block", 0.0
    key, value = _head_sizes(config, heads)
    window = _window(config, number)
    context = (length + 1) / 2 if window is None or window >= length else _windowed(window, length)
    return ("attention" if window is None else "window attention"), 2.0 * context * heads * (key + value)


def _windowed(window: int, length: int) -> float:
    """Mean number of tokens seen by a token of a row, itself included."""
    return (window * (window + 1) / 2 + (length - window) * window) / length


def _head_sizes(config: Any, heads: int) -> tuple[int, int]:
    nope, rope = _first(config, "qk_nope_head_dim"), _first(config, "qk_rope_head_dim")
    size = _first(config, "head_dim") or _first(config, "hidden_size", "n_embd") // heads
    if nope and _first(config, "kv_lora_rank"):
        return nope + rope, _first(config, "v_head_dim") or nope
    return size, size


def _window(config: Any, number: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int):
        return None
    if isinstance(kinds, (list, tuple)) and number < len(kinds):
        return window if "sliding" in str(kinds[number]) or "chunked" in str(kinds[number]) else None
    return window if getattr(config, "use_sliding_window", True) else None


def _state_size(config: Any, mixer: nn.Module) -> float:
    """heads x d_key x d_value of a linear mixer, from its own attributes or the config's fields."""
    for owner in _owners(mixer, config):
        heads = _first(owner, "num_v_heads", "linear_num_value_heads", "num_heads", "n_heads", "num_attention_heads")
        key = _first(owner, "head_k_dim", "linear_key_head_dim", "ssm_state_size", "state_size", "d_state", "head_dim")
        value = _first(owner, "head_v_dim", "linear_value_head_dim", "head_dim", "mamba_head_dim")
        if heads and key:
            return float(heads * key * (value or key))
    return 0.0


def _owners(mixer: nn.Module, config: Any) -> Iterator[Any]:
    yield mixer
    nested = getattr(config, "linear_attn_config", None)
    if isinstance(nested, dict):
        yield nested
    yield config


def _first(owner: Any, *names: str) -> int:
    for name in names:
        value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
