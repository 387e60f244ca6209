"""What each module does in the model, from its structure and from what it was seen to call in the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.structure import Kind, Structure
from onboarding.stages.parse.tracer import Trace

EMBEDDING, HEAD, NORM, MIXER = "embedding", "head", "norm", "mixer"
DENSE, EXPERTS, SHARED, ROUTER = "dense ffn", "routed experts", "shared experts", "router"
VISION, AUDIO, RESIDUAL, OTHER = "vision tower", "audio tower", "residual path", "other"
ROLES = (EMBEDDING, MIXER, DENSE, EXPERTS, SHARED, ROUTER, NORM, RESIDUAL, HEAD, VISION, AUDIO, OTHER)


@dataclass(frozen=True, kw_only=True)
class LayerRoles:
    """The roles inside the layers of one kind, by path relative to the layer."""

    kind: Kind
    roles: dict[str, str]
    mixers: dict[str, list[LeafCall]]
    """Relative path of each mixer -> leaves that it called."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Relative path of each mixer -> library functions that its marked functions stand for, convolutions left out."""
    moe: str | None = None
    """Relative path of the block of experts."""
    experts: tuple[str, ...] = ()
    experts_call: LeafCall | None = None
    feed_forwards: tuple[str, ...] = ()


def epsilon_of(module: nn.Module) -> float | None:
    """The module's small constant, found by its name and size; norms have exactly one."""
    found = [
        value
        for name, value in vars(module).items()
        if "eps" in name and isinstance(value, float) and 0.0 < value < 1e-2
    ]
    return found[0] if len(found) == 1 else None


def is_norm(module: nn.Module) -> bool:
    """A leaf with an epsilon whose parameters, if any, are vectors."""
    if next(module.children(), None) is not None or isinstance(module, nn.Identity):
        return False
    parameters = list(module.parameters(recurse=False))
    if any(p.dim() > 1 for p in parameters):
        return False
    return epsilon_of(module) is not None or (isinstance(module, nn.RMSNorm) and bool(parameters))


def matrices(module: nn.Module) -> int:
    """How many weight matrices a module holds."""
    return sum(p.dim() >= 2 for p in module.parameters())


def _relative(path: str, base: str) -> str | None:
    return path[len(base) + 1 :] if path.startswith(base + ".") else ("" if path == base else None)


def _has_sequence_settings(module: nn.Module) -> bool:
    """Settings that only a mixer has: the layer's position in the cache, or convolutions along the sequence."""
    return any(
        hasattr(child, "layer_idx") or isinstance(child, nn.Conv1d) or hasattr(child, "num_key_value_groups")
        for child in module.modules()
    )


def _holds_experts(module: nn.Module, counts: set[int]) -> str | None:
    """Relative path of a list of equal feed-forwards, or of stacked expert weights, inside a module."""
    name: str
    for name, child in module.named_modules():
        if (
            isinstance(child, nn.ModuleList)
            and len(child) in counts
            and len({type(c) for c in child}) == 1
            and matrices(child[0]) > 1
        ):
            return name
        if name and any(p.dim() == 3 and p.shape[0] in counts for p in child.parameters(recurse=False)):
            return name
    return None


def expert_counts(config: Any) -> set[int]:
    """Numbers of routed experts that the configuration states."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    values = {getattr(config, name, None) for name in names}
    return {value for value in values if isinstance(value, int) and value > 1}


def layer_roles(structure: Structure, kind: Kind, trace: Trace) -> LayerRoles:
    """Roles inside one kind of layer."""
    layer, base = structure.layers[kind.first], f"{structure.prefix}.{kind.first}"
    leaf_paths: dict[str, list[LeafCall]] = {}
    experts: dict[str, LeafCall | None] = {}
    for operation in trace.operations:
        if operation.leaf is None or operation.phase != "forward":
            continue
        relative = _relative(operation.path, base)
        if relative is None:
            continue
        if operation.leaf.kind == "experts":
            experts[relative] = operation.leaf
        else:
            leaf_paths.setdefault(relative, []).append(operation.leaf)

    marked: dict[str, list[str]] = {}
    for path, kernel in trace.marked:
        relative = _relative(path, base)
        if relative is not None and "conv" not in kernel:
            marked.setdefault(relative, []).append(kernel)
    roles: dict[str, str] = {}
    mixers: dict[str, list[LeafCall]] = {}
    feed_forwards: list[str] = []
    moe: str | None = None
    if not experts:
        for name, child in layer.named_children():
            inside = _holds_experts(child, expert_counts(structure.text_config))
            if inside is not None:
                experts[f"{name}.{inside}".rstrip(".")] = None
    if experts:
        moe = next(iter(experts)).rpartition(".")[0]
    for name, child in layer.named_children():
        called = [leaf for path, leaves in leaf_paths.items() if _relative(path, name) is not None for leaf in leaves]
        called = [leaf for leaf in called if "conv" not in leaf.name]
        kernels = [kernel for path, names in marked.items() if _relative(path, name) is not None for kernel in names]
        if is_norm(child):
            role = NORM
        elif called or kernels:
            role = MIXER
            mixers[name] = called
        elif any(_relative(path, name) is not None for path in experts):
            role = SHARED  # refined below: the experts and the router get their own roles
        elif matrices(child) >= 2 and _has_sequence_settings(child):
            role = MIXER
            mixers[name] = []
        elif sum(isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" for m in child.modules()) >= 2:
            role = DENSE
            feed_forwards.append(name)
        elif matrices(child):
            role = RESIDUAL
        else:
            role = OTHER
        for inner, module in child.named_modules():
            roles[f"{name}.{inner}".rstrip(".")] = NORM if is_norm(module) else role
    roles[""] = RESIDUAL
    if moe is not None:
        _refine_moe(layer, moe, tuple(experts), roles)
    return LayerRoles(
        kind=kind,
        roles=roles,
        mixers=mixers,
        kernels={
            name: [kernel for path, names in marked.items() if _relative(path, name) is not None for kernel in names]
            for name in mixers
        },
        moe=moe,
        experts=tuple(experts),
        experts_call=next(iter(experts.values()), None),
        feed_forwards=tuple(feed_forwards),
    )


def _refine_moe(layer: nn.Module, moe: str, experts: tuple[str, ...], roles: dict[str, str]) -> None:
    """Experts, router and shared experts inside a block of experts.

    The router holds a matrix with one row an expert; what else has matrices runs for every token.
    """
    block = layer.get_submodule(moe)
    counts: set[int] = set()
    for path in experts:
        module = layer.get_submodule(path)
        counts.update(
            [len(module)]
            if isinstance(module, nn.ModuleList)
            else [p.shape[0] for p in module.parameters(recurse=False)]
        )
    for path in list(roles):
        if any(_relative(path, e) is not None for e in experts):
            roles[path] = EXPERTS
    for name, child in block.named_children():
        path = f"{moe}.{name}" if moe else name
        if path in experts or roles.get(path) in (MIXER, NORM):
            continue
        linear = [p for p in child.parameters() if p.dim() == 2]
        is_router = len(linear) == 1 and linear[0].shape[0] in counts
        if not moe and roles.get(path) != OTHER and not is_router:
            continue  # the experts stand in the layer itself: its other children keep their roles
        for inner, part in child.named_modules():
            full = f"{path}.{inner}".rstrip(".")
            roles[full] = NORM if is_norm(part) else ROUTER if is_router else SHARED
    if moe:
        roles[moe] = ROUTER


@dataclass(frozen=True, kw_only=True)
class ModelRoles:
    """Roles of all modules of a model."""

    structure: Structure
    by_kind: dict[int, LayerRoles]
    """First layer of a kind -> its roles."""
    outside: dict[str, str] = field(default_factory=dict)
    """Longest matching prefix of a path outside the layers -> role."""

    def of_layer(self, index: int) -> LayerRoles:
        """The roles of the layer at a position."""
        return self.by_kind[self.structure.kind_of(index).first]

    def layer_of(self, path: str) -> int | None:
        """Position of the decoder layer that a module path lies in."""
        relative = _relative(path, self.structure.prefix)
        head = relative.split(".", 1)[0] if relative else ""
        return int(head) if head.isdigit() else None

    def role(self, path: str) -> str:
        """The role of a module by its name in the model."""
        index = self.layer_of(path)
        if index is not None:
            relative = _relative(path, f"{self.structure.prefix}.{index}") or ""
            known = self.of_layer(index).roles
            while relative and relative not in known:  # a function that a module calls
                relative = relative.rpartition(".")[0]
            return known.get(relative, OTHER)
        while True:
            if path in self.outside:
                return self.outside[path]
            if not path:
                return OTHER
            path = path.rpartition(".")[0]


def find_roles(model: Any, structure: Structure, trace: Trace) -> ModelRoles:
    """Roles of every module."""
    outside: dict[str, str] = {}
    embedding, head = named_module(model, "get_input_embeddings"), named_module(model, "get_output_embeddings")
    inside = structure.decoder_prefix
    for name, module in model.named_modules():
        if module is embedding:
            outside[name] = EMBEDDING
        elif module is head:
            outside[name] = HEAD
        elif name and not (name + ".").startswith(structure.prefix + ".") and is_norm(module):
            outside[name] = _tower(name, inside) or NORM
        elif name.count(".") <= inside.count(".") + 1 and (tower := _tower(name, inside)):
            outside[name] = tower
    return ModelRoles(
        structure=structure,
        by_kind={kind.first: layer_roles(structure, kind, trace) for kind in structure.kinds},
        outside=outside,
    )


def named_module(model: Any, getter: str) -> Any:
    """What a class says its embedding or head is; None where it does not say."""
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _tower(name: str, decoder: str) -> str | None:
    """The modality of a part that stands beside the decoder."""
    if not name or not decoder or (name + ".").startswith(decoder + ".") or (decoder + ".").startswith(name + "."):
        return None
    lowered = name.lower()
    if any(word in lowered for word in ("vis", "image", "multi_modal", "projector", "video")):
        return VISION
    return AUDIO if any(word in lowered for word in ("audio", "speech")) else None
