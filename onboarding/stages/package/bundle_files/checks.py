"""Is a module what a kernel computes? Every flag that can be read off the instance must agree with the spec."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_epsilon")
DEFAULT_ATTRIBUTES = {
    "norm": {"weight": "weight", "bias": "bias"},
    "gated_norm": {"weight": "weight"},
    "gated_mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "experts": {
        "gate_up": "gate_up_proj",
        "down": "down_proj",
        "gate_up_bias": "gate_up_proj_bias",
        "down_bias": "down_proj_bias",
    },
}


def attributes(binding: dict[str, Any]) -> dict[str, str]:
    """Tensor name -> attribute of the module."""
    return {**DEFAULT_ATTRIBUTES.get(binding["hook"], {}), **binding.get("attributes", {})}


def mismatch(binding: dict[str, Any], spec: dict[str, Any], module: nn.Module) -> str | None:
    """Why ``module`` does not compute ``spec``, or None when every flag that can be read off agrees."""
    names = attributes(binding)
    hook = binding["hook"]
    if hook in ("norm", "gated_norm"):
        return _norm_mismatch(spec, module, names)
    if hook == "gated_mlp":
        needed = [names["down"]] + (
            [names["gate"], names["up"]] if spec["layout"] == "separate" else [names["gate_up"]]
        )
        missing = [n for n in needed if not isinstance(getattr(module, n, None), nn.Module)]
        if missing:
            return f"no projection {', '.join(missing)}"
        return _limit_mismatch(spec, module) or _activation_mismatch(spec, module)
    if hook == "experts":
        return _experts_mismatch(spec, module)
    if hook == "hyper_connection":
        return _streams_mismatch(spec, module, names)
    if not binding.get("function"):
        return "the binding names no function"
    return None


def _norm_mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    found = [float(vars(module)[n]) for n in EPS_NAMES if isinstance(vars(module).get(n), (int, float))]
    if not found or found[0] != spec["eps"]:
        return f"eps {found[0] if found else 'unknown'} where the kernel has {spec['eps']}"
    if spec["weighted"] != isinstance(getattr(module, names["weight"], None), Tensor):
        return "weight" if spec["weighted"] else "a weight where the kernel has none"
    if bool(spec.get("bias")) != isinstance(getattr(module, names.get("bias", "bias"), None), Tensor):
        return "no bias" if spec.get("bias") else "a bias where the kernel has none"
    activation = vars(module).get("activation")
    if isinstance(activation, str) and activation not in (spec["gate"], {"silu": "swish"}.get(spec["gate"])):
        return f"gate {activation} where the kernel has {spec['gate']}"
    return None


def _experts_mismatch(spec: dict[str, Any], module: nn.Module) -> str | None:
    flags = {
        "has_gate": True,
        "has_bias": spec["bias"],
        "is_transposed": spec["transposed"],
        "is_concatenated": spec["gate_up_layout"] == "concatenated",
        "has_post_expert_norm": False,
    }
    for name, wanted in flags.items():
        if getattr(module, name, None) is not wanted:
            return f"{name} is {getattr(module, name, None)} where the kernel has {wanted}"
    gate_up = torch.linspace(-15, 15, 64).reshape(4, 16)
    gate, up = gate_up.chunk(2, -1) if flags["is_concatenated"] else (gate_up[:, ::2], gate_up[:, 1::2])
    with torch.no_grad():
        apply_gate: Any = module._apply_gate
        same = torch.allclose(apply_gate(gate_up), gated(spec, gate, up), rtol=1e-4, atol=1e-5)
    return None if same else "its activation computes something else"


def _streams_mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    found: dict[str, Any] = {n: getattr(module, names.get(n, ""), None) for n in ("fn", "base", "scale")}
    if not all(isinstance(t, Tensor) for t in found.values()):
        return "parameters by other names"
    n = spec["streams"]
    columns = n * (1 + spec["post"] + (n if spec["rounds"] else 0))
    if found["fn"].shape[0] != columns or found["fn"].shape[1] % n:
        return f"a projection {tuple(found['fn'].shape)} where the kernel has {columns} rows"
    norms = [vars(c).get(e) for c in module.children() for e in EPS_NAMES if isinstance(vars(c).get(e), float)]
    if norms != [spec["eps"]]:
        return f"eps {norms} where the kernel has {spec['eps']}"
    numbers = [v for v in vars(module).values() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    for name, always in (("floor", 0.0), ("rounds", 0), ("post_factor", 2.0)):
        if spec[name] != always and spec[name] not in numbers:
            return f"no constant {spec[name]} ({name}) as the kernel has"
    return None


def _limit_mismatch(spec: dict[str, Any], module: nn.Module) -> str | None:
    limits = [v for n, v in vars(module).items() if "limit" in n and isinstance(v, (int, float))]
    wanted = [] if spec["limit"] is None else [spec["limit"]]
    return None if limits == wanted else f"limits {limits} where the kernel has {wanted}"


def _activation_mismatch(spec: dict[str, Any], module: nn.Module) -> str | None:
    function = next((getattr(module, n) for n in ("act_fn", "activation_fn", "act") if hasattr(module, n)), None)
    if function is None:
        return "no activation function"
    x = torch.linspace(-8, 8, 65)
    with torch.no_grad():
        same = torch.allclose(
            function(x), gated({**spec, "limit": None, "up_offset": 0.0}, x, torch.ones(65)), atol=1e-5
        )
    return None if same else f"{type(function).__name__} is not {spec['activation']}"


def gated(spec: dict[str, Any], gate: Tensor, up: Tensor) -> Tensor:
    """What the spec says: act(clamped gate) x (clamped up + offset)."""
    if spec["limit"] is not None:
        gate, up = gate.clamp(max=spec["limit"]), up.clamp(-spec["limit"], spec["limit"])
    functional = torch.nn.functional
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: x * torch.sigmoid(spec["alpha"] * x),
        "gelu": functional.gelu,
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda x: torch.relu(x) ** 2,
        "sigmoid": torch.sigmoid,
    }
    y: Tensor = activations[spec["activation"]](gate) * (up + spec["up_offset"])
    return y


def sizes(binding: dict[str, Any], module: nn.Module) -> dict[str, int]:
    """The module's sizes under the spec's names, as far as they can be read off its tensors."""
    names = attributes(binding)
    if binding["hook"] in ("norm", "gated_norm"):
        weight = getattr(module, names["weight"], None)
        return {"hidden": weight.shape[0]} if isinstance(weight, Tensor) else {}
    if binding["hook"] == "gated_mlp":
        width = getattr(getattr(module, names["down"], None), "in_features", None)
        return {"width": width} if isinstance(width, int) else {}
    if binding["hook"] == "experts":
        gate_up = getattr(module, names["gate_up"], None)
        return {"experts": gate_up.shape[0]} if isinstance(gate_up, Tensor) else {}
    return {}
