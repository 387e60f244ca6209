"""Counting parameters by role, and the parts of a checkpoint that the class does not build."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from onboarding.architecture import Census
from onboarding.stages.parse.roles import EXPERTS, ROLES, LayerRoles, ModelRoles, named_module

OWN_EMBEDDING = ("deepseek_v3", "deepseek_v32", "glm4_moe")
"""Model types whose published checkpoints store embedding and head once more with each layer that predicts more tokens;
nothing in a configuration says so."""
_MTP_FIELD = re.compile(r"(nextn|mtp).*(layers|modules)|(layers|modules).*(nextn|mtp)")


def top_k_share(layer: LayerRoles, config: Any, module: nn.Module) -> float:
    """The share of a layer's routed experts that one token uses."""
    if layer.experts_call is not None:
        facts = layer.experts_call.facts
        return min(1.0, float(facts["top_k"] / facts["experts"]))
    names = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "num_selected_experts")
    used = next((v for n in names if isinstance(v := getattr(config, n, None), int)), None)
    count = len(module) if isinstance(module, nn.ModuleList) else next(p.shape[0] for p in module.parameters())
    return min(1.0, used / count) if used else 1.0


def unused_parameters(layer: nn.Module, known: LayerRoles) -> int:
    """Parameters of stacked experts that have only some of their matrices, and so can never run."""
    unused = 0
    for path in known.experts:
        matrices = [p for p in layer.get_submodule(path).parameters(recurse=False) if p.dim() == 3]
        whole = min((p.shape[0] for p in matrices), default=0)
        unused += sum((p.shape[0] - whole) * (p.numel() // p.shape[0]) for p in matrices)
    return unused


def block_parameters(roles: ModelRoles, index: int) -> tuple[int, int]:
    """Parameters of one decoder layer: all, and those that one token uses."""
    layer, known = roles.structure.layers[index], roles.of_layer(index)
    unused = unused_parameters(layer, known)
    total = sum(p.numel() for p in layer.parameters()) - unused
    routed = -unused
    share = 1.0
    for path in known.experts:
        module = layer.get_submodule(path)
        routed += sum(p.numel() for p in module.parameters())
        share = top_k_share(known, roles.structure.text_config, module)
    return total, total - routed + round(routed * share)


def multi_token_prediction(model: nn.Module, config: Any, roles: ModelRoles) -> dict[str, int]:
    """Parameters of next-token-prediction layers that the published checkpoint holds and the class skips.

    Each holds one decoder block with full attention, a projection of [embedding; hidden] to hidden, and three norms.
    """
    count, dense = _mtp_count(model, config, roles)
    if not count:
        return {}
    structure = roles.structure
    hidden = int(getattr(structure.text_config, "hidden_size", 0))
    last = len(structure.layers) - 1
    routed = roles.of_layer(last).moe is not None
    stateless = [
        kind.layers[-1]
        for kind in structure.kinds
        if not any(
            leaf.kind == "linear_attention" for leaves in roles.by_kind[kind.first].mixers.values() for leaf in leaves
        )
        and (roles.by_kind[kind.first].moe is not None) == routed
    ]
    index = max(stateless, default=last)
    block = block_parameters(roles, index)[0]
    if dense:
        layer, known = structure.layers[index], roles.of_layer(index)
        experts = sum(p.numel() for path in known.experts for p in layer.get_submodule(path).parameters())
        block -= experts - unused_parameters(layer, known)
    parts = {"multi-token prediction": count * (block + 2 * hidden * hidden + 3 * hidden)}
    if roles.structure.text_config.model_type in OWN_EMBEDDING:
        ends = (named_module(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
        parts["its embedding and head"] = count * sum(p.numel() for end in ends if end for p in end.parameters())
    return parts


def _mtp_count(model: nn.Module, config: Any, roles: ModelRoles) -> tuple[int, bool]:
    """How many such layers the checkpoint holds, and whether they are dense.

    Only a class that ignores such weights on loading has a checkpoint with them. The published checkpoints that keep
    them under ``model.mtp`` (LongCat-Flash, MiMo-V2-Flash) leave out the
    routed experts; the others repeat a whole block.
    """
    layers = len(roles.structure.layers)
    ignored = {
        pattern
        for module in model.modules()
        for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    }
    held = [p for p in ignored if "mtp" in p or re.search(rf"layers\\\.{layers}(?!\d)", p)]
    if not held:
        return 0, False
    return max(prediction_layers(config, roles), default=1), any(re.search(r"model\\\.mtp", p) for p in held)


def prediction_layers(config: Any, roles: ModelRoles) -> list[int]:
    """How many multi-token prediction layers the configuration states; empty where it says nothing."""
    return [
        value
        for part in (config, roles.structure.text_config)
        for name, value in vars(part).items()
        if _MTP_FIELD.search(name) and isinstance(value, int) and not isinstance(value, bool)
    ]


def count_parameters(model: nn.Module, config: Any, roles: ModelRoles) -> Census:
    """The census of a model; tied embeddings count once, under the embedding."""
    by_role: Counter[str] = Counter()
    fp32 = 0
    for name, parameter in model.named_parameters():
        by_role[roles.role(name.rpartition(".")[0])] += parameter.numel()
        fp32 += parameter.numel() if parameter.dtype == torch.float32 else 0
    idle = 0
    for index, layer in enumerate(roles.structure.layers):
        total, active = block_parameters(roles, index)
        idle += total - active
        by_role[EXPERTS] -= unused_parameters(layer, roles.of_layer(index))
    built = sum(by_role.values())
    not_built = multi_token_prediction(model, config, roles)
    embedding, head = named_module(model, "get_input_embeddings"), named_module(model, "get_output_embeddings")
    return Census(
        total=built + sum(not_built.values()),
        active=built - idle,
        by_role={role: by_role[role] for role in ROLES if by_role[role]},
        tied_embeddings=getattr(head, "weight", None) is not None
        and getattr(head, "weight", None) is getattr(embedding, "weight", None),
        fp32_parameters=fp32,
        not_built=not_built,
    )
