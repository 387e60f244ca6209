"""From a traced model to its operator uses: every claim is proven numerically before it counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kernel_templates.spec import OperatorSpec
from onboarding.architecture import Binding, Hook, OperatorUse
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.roles import (
    AUDIO,
    DENSE,
    EXPERTS,
    HEAD,
    NORM,
    RESIDUAL,
    ROUTER,
    SHARED,
    VISION,
    ModelRoles,
    epsilon_of,
)
from onboarding.stages.parse.rotary import RotaryCall
from onboarding.stages.parse.structure import Structure
from onboarding.stages.parse.tracer import ModuleCall, Trace
from onboarding.stages.parse.uses.experts import ATTRIBUTES, BIASES, prove_experts
from onboarding.stages.parse.uses.gates import GatedMlp, prove_gated_mlp
from onboarding.stages.parse.uses.hyper_connections import (
    HyperConnection,
    is_hyper_connection,
    prove_hyper_connection,
)
from onboarding.stages.parse.uses.indexer import is_indexer, prove_indexer
from onboarding.stages.parse.uses.linear_attention import prove_linear_attention, prove_state_space
from onboarding.stages.parse.uses.loss import ProvenLoss, prove_loss
from onboarding.stages.parse.uses.norms import prove_norm
from onboarding.stages.parse.uses.rotary import prove_rotary
from onboarding.stages.parse.uses.routing import ProvenRouter, prove_routing
from onboarding.stages.parse.uses.short_convolution import prove_short_convolution
from onboarding.stages.parse.uses.sparse_attention import is_sparse_latent_attention, prove_sparse_attention

_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float32": "float32", "torch.float16": "float16"}


@dataclass(kw_only=True)
class _Found:
    spec: OperatorSpec
    roles: set[str] = field(default_factory=set)
    calls: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0
    bindings: dict[tuple[str, str, str], Binding] = field(default_factory=dict)


@dataclass(kw_only=True)
class Proposals:
    """What was proven, and what was not."""

    uses: list[OperatorUse] = field(default_factory=list)
    novel: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    owner: dict[str, str] = field(default_factory=dict)
    """Traced module path -> digest of the operator that its non-matrix work belongs to."""
    leaf_owner: dict[tuple[str, str], str] = field(default_factory=dict)
    """(module path, kind of leaf) -> digest of the operator that the marked function is."""


def class_name(module: nn.Module) -> str:
    """``package.module:ClassName``."""
    return f"{type(module).__module__}:{type(module).__qualname__}"


class Proposer:
    """Collects proven uses over a model's traced modules."""

    def __init__(self, model: nn.Module, structure: Structure, roles: ModelRoles, trace: Trace) -> None:
        self.model, self.structure, self.roles, self.trace = model, structure, roles, trace
        self.found: dict[str, _Found] = {}
        self.result = Proposals()
        self._proofs: dict[Any, Any] = {}

    def run(self) -> Proposals:
        """Go over all traced calls."""
        for call in self.trace.calls:
            if call.path and self._in_language(call.path):
                self._module(call, self.model.get_submodule(call.path))
        for operation in self.trace.operations:
            if operation.leaf is not None and operation.phase == "forward":
                self._leaf(operation.path, operation.leaf)
        for turn in self.trace.rotary:
            if turn.path and self._in_language(turn.path):
                self._rotary(turn)
        self._loss()
        for known in self.roles.by_kind.values():
            layer = self.structure.layers[known.kind.first]
            for name, child in layer.named_children():
                unnamed = name in known.mixers and not known.mixers[name] and not known.kernels.get(name)
                if f"{self.structure.prefix}.{known.kind.first}.{name}" in self.result.owner:
                    continue
                if known.roles.get(name) == RESIDUAL or unnamed:
                    self.result.novel.append(type(child).__qualname__)
        self.result.novel = list(dict.fromkeys(self.result.novel))
        self.result.uses = [self._use(digest, found) for digest, found in self.found.items()]
        return self.result

    # ---- one call -------------------------------------------------------------------------------------------

    def _in_language(self, path: str) -> bool:
        return self.roles.role(path) not in (VISION, AUDIO)

    def _once(self, key: Any, prove: Any) -> Any:
        if key not in self._proofs:
            self._proofs[key] = prove()
        return self._proofs[key]

    def _module(self, call: ModuleCall, module: nn.Module) -> None:
        role = self.roles.role(call.path)
        dtype = _DTYPES.get(call.dtype)
        if dtype is None or self._within_another(call.path):
            return
        if role == NORM:
            width = call.shapes[0][-1]
            gated = len(call.shapes) > 1 and call.shapes[0] == call.shapes[1]
            key = (type(module), epsilon_of(module), width, gated, dtype, module.extra_repr())
            norm = self._once(key, lambda: prove_norm(module, width, gated, dtype))
            if norm is None:
                self._unproven(module, "norm")
                return
            spec, attributes = norm
            self._add(
                spec, call, module, "gated_norm" if gated else "norm", attributes, self._norm_role(call.path, gated)
            )
        elif role == ROUTER and not isinstance(module, nn.Linear) and next(module.children(), None) is None:
            self._router(call, module, dtype)
        elif role in (DENSE, SHARED) and 2 <= sum(isinstance(c, nn.Linear) for c in module.children()) <= 3:
            shapes = tuple(tuple(p.shape) for p in module.parameters())
            proven: GatedMlp | None = self._once((type(module), shapes, dtype), lambda: prove_gated_mlp(module, dtype))
            if proven is None:
                self._unproven(module, "gated feed-forward")
                return
            self._add(proven.spec, call, module, "gated_mlp", proven.attributes, role)
        elif is_indexer(module):
            settings = tuple(v for v in vars(module).values() if isinstance(v, int))
            choice = self._once(
                (type(module), settings, dtype), lambda: prove_indexer(module, call.shapes[0][1], dtype)
            )
            if choice is not None:
                self._add(choice, call, module, "indexer", {}, "indexer")
        elif is_hyper_connection(module, call.shapes):
            constants = tuple(v for v in vars(module).values() if isinstance(v, (int, float)))
            streams: HyperConnection | None = self._once(
                (type(module), call.shapes, constants, dtype),
                lambda: prove_hyper_connection(module, call.shapes, dtype),
            )
            if streams is None:
                self._unproven(module, "hyper-connection")
                return
            self._add(streams.spec, call, module, "hyper_connection", streams.attributes, RESIDUAL)

    def _within_another(self, path: str) -> bool:
        """Whether a kernel takes the place of a module around this one, with all that is inside."""
        while path := path.rpartition(".")[0]:
            owner = self.found.get(self.result.owner.get(path, ""))
            if owner is not None and owner.spec.family == "hyper_connection":
                return True
        return False

    def _leaf(self, path: str, leaf: LeafCall) -> None:
        module = self.model.get_submodule(path)
        dtype = _DTYPES.get(str(next(p.dtype for p in module.parameters())), "bfloat16")
        call = ModuleCall(path=path, shapes=leaf.shapes, dtype=dtype)
        if leaf.kind == "experts":
            key: Any = (type(module), leaf.shapes, leaf.facts["top_k"])
            spec = self._once(key, lambda: prove_experts(module, leaf, dtype))
            if spec is None:
                self._unproven(module, "routed experts")
                return
            attributes = {**ATTRIBUTES, **(BIASES if spec.bias else {})}
            self._add(spec, call, module, "experts", attributes, EXPERTS, leaf=leaf)
        elif leaf.kind == "linear_attention":
            marked = leaf.facts["marked"]
            dtype = _DTYPES.get(leaf.facts["dtypes"]["v"], dtype)
            key = (marked.module.__name__, marked.attribute, leaf.shapes, leaf.facts["qk_l2norm"], leaf.facts["scale"])
            spec = self._once(key, lambda: prove_linear_attention(leaf, dtype))
            if spec is None:
                self._unproven(module, f"linear attention {leaf.name}")
                return
            self._add(spec, call, module, "linear_attention", {}, "linear attention", marked.attribute, leaf)
        elif leaf.kind == "state_space":
            marked = leaf.facts["marked"]
            dtype = _DTYPES.get(leaf.facts["dtype"], dtype)
            facts = tuple(v for v in leaf.facts.values() if isinstance(v, (int, str)))
            spec = self._once(
                (marked.module.__name__, marked.attribute, *facts), lambda: prove_state_space(leaf, dtype)
            )
            if spec is None:
                self._unproven(module, f"state space {leaf.name}")
                return
            self._add(spec, call, module, "state_space", {}, "linear attention", marked.attribute, leaf)
        elif leaf.kind == "short_convolution":
            marked = leaf.facts["marked"]
            dtype = _DTYPES.get(leaf.facts["dtype"], dtype)
            key = (marked.module.__name__, marked.attribute, leaf.shapes[1:], leaf.facts["activation"], dtype)
            spec = self._once(key, lambda: prove_short_convolution(leaf, dtype))
            if spec is None:
                self._unproven(module, f"short convolution {leaf.name}")
                return
            self._add(spec, call, module, "short_convolution", {}, "short convolution", marked.attribute, leaf)

        elif leaf.kind == "attention" and is_sparse_latent_attention(module):
            key = (type(module), leaf.shapes, module.indexer is None, dtype, "sparse attention")
            spec = self._once(key, lambda: prove_sparse_attention(module, leaf, dtype))
            if spec is not None:
                self._add(spec, call, module, "sparse_attention", {}, "sparse attention", leaf=leaf)

    def _router(self, call: ModuleCall, module: nn.Module, dtype: str) -> None:
        """A module whose forward is a router; parts of others (a linear layer, a block of experts) are none."""
        hidden = call.shapes[0][-1]
        shapes = tuple(tuple(p.shape) for p in module.parameters())
        key = (type(module), shapes, dtype, "router", module.extra_repr())
        proven: ProvenRouter | None = self._once(key, lambda: prove_routing(module, hidden, dtype))
        if proven is not None:
            self._add(proven.spec, call, module, "routing", proven.attributes, "router")

    def _rotary(self, call: RotaryCall) -> None:
        dtype = _DTYPES.get(call.dtype)
        key = (call.function, tuple(call.shapes.items()), tuple(call.options.items()), dtype)
        spec = self._once(key, lambda: None if dtype is None else prove_rotary(call, dtype))
        module = self.model.get_submodule(call.path)
        if spec is None:
            text = f"{type(module).__qualname__}: {call.attribute} is no rotary embedding that a family computes"
            self.result.warnings += [text] if text not in self.result.warnings else []
            return
        q, axis = call.shapes["q"], call.options.get("unsqueeze_dim", 1)
        # rows are tokens
        heads = ModuleCall(path=call.path, shapes=((q[0], q[3 - axis], q[axis] * q[3]),), dtype=call.dtype)
        self._add(spec, heads, module, "rotary", {}, "rotary embedding", call.attribute, place=call.place)

    def _loss(self) -> None:
        """The head and the loss, which are one operator of the whole model."""
        call = next((c for c in self.trace.calls if self.roles.role(c.path) == HEAD and c.dtype in _DTYPES), None)
        if call is None:
            return
        proven: ProvenLoss | None = prove_loss(self.model, self.structure.decoder_prefix, _DTYPES[call.dtype])
        if proven is None:
            text = f"{type(self.model).__qualname__}: its head and loss are not proven to be a linear cross-entropy"
            self.result.warnings.append(text)
            return
        whole = ModuleCall(path="", shapes=call.shapes, dtype=call.dtype)
        self._add(proven.spec, whole, self.model, "linear_cross_entropy", {"head": proven.head}, "head and loss")
        self.result.owner[proven.head] = proven.spec.digest()

    def _norm_role(self, path: str, gated: bool) -> str:
        index = self.roles.layer_of(path)
        if index is None:
            return "final norm"
        relative = path[len(f"{self.structure.prefix}.{index}.") :]
        if gated:
            return "output norm"
        return "block norm" if "." not in relative else "inner norm"

    def _unproven(self, module: nn.Module, what: str) -> None:
        if type(module).__module__.startswith("torch.nn."):
            return  # torch's own layers have torch's own kernels
        text = f"{type(module).__qualname__}: not proven to be a known {what}; it stays with its own torch code"
        if text not in self.result.warnings:
            self.result.warnings.append(text)
            self.result.novel.append(type(module).__qualname__)

    # ---- collecting -----------------------------------------------------------------------------------------

    def _places(self, path: str) -> list[str]:
        """The same module in every layer of its kind; a shared module has one name."""
        index = self.roles.layer_of(path)
        if index is None:
            return [path]
        relative = path[len(f"{self.structure.prefix}.{index}") :]
        return [f"{self.structure.prefix}.{layer}{relative}" for layer in self.structure.kind_of(index).layers]

    def _add(
        self,
        spec: OperatorSpec,
        call: ModuleCall,
        module: nn.Module,
        hook: Hook,
        attributes: dict[str, str],
        role: str,
        function: str | None = None,
        leaf: LeafCall | None = None,
        place: str = "",
    ) -> None:
        digest = spec.digest()
        found = self.found.setdefault(digest, _Found(spec=spec))
        places = self._places(call.path)
        rows = _rows(spec, call)
        found.roles.add(role)
        found.calls += len(places)
        found.flops += spec.flops(rows) * len(places)
        found.bytes_moved += spec.bytes_moved(rows) * len(places)
        key = (hook, class_name(module), function or "")
        binding = found.bindings.setdefault(
            key, Binding(hook=hook, target=class_name(module), function=function, attributes=attributes)
        )
        binding.module_paths += [place for place in places if place not in binding.module_paths]
        if leaf is not None:
            self.result.leaf_owner[call.path, leaf.kind] = digest
        else:
            self.result.owner[place or call.path] = digest

    def _use(self, digest: str, found: _Found) -> OperatorUse:
        return OperatorUse(
            digest=digest,
            spec=found.spec.to_dict(),
            words=found.spec.words(),
            role=", ".join(sorted(found.roles)),
            bindings=list(found.bindings.values()),
            calls=found.calls,
            flops=found.flops,
            bytes_moved=found.bytes_moved,
        )


def _rows(spec: OperatorSpec, call: ModuleCall) -> int:
    """How many rows ("tokens" of the spec) one call has."""
    shape = call.shapes[0]
    if spec.family == "linear_attention":  # heads lie between tokens and channels
        return int(shape[0] * shape[1])
    if spec.family == "sparse_attention":  # heads before tokens
        return int(shape[0] * shape[2])
    rows: int = 1
    for size in shape[: -2 if spec.family == "hyper_connection" else -1]:
        rows *= size
    return rows


def propose_uses(model: nn.Module, structure: Structure, roles: ModelRoles, trace: Trace) -> Proposals:
    """Operator uses of a traced model, each proven; what is not proven is named in ``novel`` and ``warnings``."""
    return Proposer(model, structure, roles, trace).run()
