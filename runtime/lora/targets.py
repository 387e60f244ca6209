"""Which modules and expert weights a list of targets means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from runtime.experts.sites import Site, find_experts
from runtime.lora.config import ROLES, LoraConfig
from runtime.parallel.shard import decoder_blocks

_QKV = re.compile(
    r"^(w?(q|k|v|qk|kv|qkv|qkvz)|query|key|value|query_key_value|c_attn|in_proj_qkvz?)"
    r"(_[ab])?(_proj)?(_with_mqa)?$",
    re.I,
)
_ATTENTION = re.compile(r"attn|attention|mixer|delta|mamba|ssm|kda", re.I)
_ROUTER = re.compile(r"^(gate|router|wg|switch)$", re.I)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What gets adapters."""

    linears: list[str]
    """Names of linear layers."""
    experts: dict[str, list[str]]
    """Experts module -> names of its weights."""


def find_targets(model: nn.Module, config: LoraConfig) -> Targets:
    """Resolve the targets of ``config``.

    Raises:
        ValueError: a target matches nothing, or a router; says what there is.
    """
    sites = find_experts(model)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    routers = {n for n in linears if _is_router(n, linears[n], sites)}
    inside = _names_inside_blocks(model)
    weights = {site.name: [n for n, p in site.experts.named_parameters(recurse=False) if p.ndim == 3] for site in sites}
    by_role = {
        "qkv": [n for n in inside if n in linears and _role(n) == "qkv"],
        "attention": [n for n in inside if n in linears and _role(n) in ("qkv", "attention")],
        "mlp": [n for n in inside if n in linears and _role(n) == "mlp"],
        "linear": [n for n in inside if n in linears],
    }
    chosen: set[str] = set()
    experts: dict[str, list[str]] = {}
    for target in config.targets:
        if target == "gmm":
            found = bool(weights)
            experts |= weights
        elif target in by_role:
            names = [n for n in by_role[target] if n not in routers]
            found = bool(names)
            chosen.update(names)
        else:
            names = [n for n in linears if _matches(n, target)]
            hit = [n for n in names if n in routers]
            if hit:
                raise ValueError(f"target {target!r} is a router ({hit[0]}); routers take no adapter: leave it out")
            pairs = [(s, w) for s, ws in weights.items() for w in ws if _matches(f"{s}.{w}", target)]
            for site, weight in pairs:
                experts.setdefault(site, [])
                if weight not in experts[site]:
                    experts[site] = [w for w in weights[site] if w == weight or w in experts[site]]
            found = bool(names or pairs)
            chosen.update(names)
        if not found:
            leaves = sorted({n.rpartition(".")[2] for n in linears if n not in routers})
            leaves += sorted({f"experts.{w}" for ws in weights.values() for w in ws})
            raise ValueError(
                f"target {target!r} matches nothing in this model; roles are {', '.join(ROLES)}, "
                f"names end in {', '.join(leaves)}"
            )
    return Targets(linears=[n for n in linears if n in chosen], experts=experts)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _role(name: str) -> str:
    """Of a linear layer by its name inside the model."""
    if _QKV.match(name.rpartition(".")[2]):
        return "qkv"
    return "attention" if _ATTENTION.search(name.rpartition(".")[0].rpartition("layers.")[2]) else "mlp"


def _names_inside_blocks(model: nn.Module) -> list[str]:
    blocks = {id(block) for block in decoder_blocks(model)}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) in blocks:
            names += [f"{name}.{inner}" for inner, _ in module.named_modules() if inner]
    return names


def _is_router(name: str, linear: nn.Linear, sites: list[Site]) -> bool:
    for site in sites:
        parent = site.name.rpartition(".")[0]
        # a direct child of the block that scores one number an expert
        if name.rpartition(".")[0] == parent and linear.out_features == site.num_experts:
            return True
    return bool(_ROUTER.match(name.rpartition(".")[2])) and any(
        name.startswith(site.name.rpartition(".")[0] + ".") for site in sites
    )
