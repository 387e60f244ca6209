"""The confined side: builds the twin and the published model with the definition's own code, looks and proves.

Run through :func:`onboarding.custom_code.confined.call` only; what it returns is plain data that the caller validates.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernel_templates.novel import NovelSpec, Signature
from onboarding.novel import facts
from onboarding.novel.facts import OWN, CoreSeen, NovelModule, OperatorProposal, TensorSeen
from onboarding.novel.watch import Seen, outputs_of, tensors_of, watch
from onboarding.stages.judge.novel_child import entry_point
from onboarding.stages.parse.build import build_config, build_model, quiet
from onboarding.stages.parse.understand.compare import parameters_as
from onboarding.twin.models import build, loss_on, step_inputs
from onboarding.twin.plan import TwinPlan

TWIN_TOKENS, BATCH = 24, 2
LENGTHS = (32, 48, 64)
"""Tokens at which the published model is run without memory: what a size or a cost is as a polynomial of them."""
CLOSE = 1e-5
"""Largest relative error in float64 of a claim; the module's own code may compute parts in float32."""
NOISE = 0.3
FACTORS = (1.0, NOISE)


# ---- looking --------------------------------------------------------------------------------------------------------


def survey(config: dict[str, Any], plan: str, names: list[str]) -> list[dict[str, Any]]:
    """What is seen of the modules of these classes, as :class:`NovelModule` in JSON."""
    twin_calls = _on_twin(plan, names)[1]
    published = [_on_published(config, names, tokens) for tokens in LENGTHS]
    found: dict[str, NovelModule] = {}
    for seen in twin_calls:
        name = seen.cls.__qualname__
        module = found.setdefault(
            name,
            NovelModule(
                name=name,
                target=f"{seen.cls.__module__}:{name}",
                paths=published[0][1].get(name, []),
                source=_source(seen.cls),
                cores=[],
            ),
        )
        others = [
            next((s for s in run if (s.cls.__qualname__, s.function) == (name, seen.function)), None)
            for run, _ in published
        ]
        module.cores.append(_core(seen, others))
    return [module.model_dump(mode="json") for module in found.values()]


def _on_twin(plan: str, names: list[str]) -> tuple[nn.Module, list[Seen]]:
    twin = build(TwinPlan.from_json(plan))
    inputs = step_inputs(twin, TWIN_TOKENS, batch=BATCH, seed=0)
    with torch.no_grad():
        return twin, watch(twin, names, lambda: loss_on(twin, inputs))


def _on_published(config: dict[str, Any], names: list[str], tokens: int) -> tuple[list[Seen], dict[str, list[str]]]:
    model, mode, _ = build_model(build_config(config))
    paths: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        paths.setdefault(type(module).__qualname__, []).append(path)
    whole: Any = model
    with mode, quiet(), torch.no_grad():
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        seen = watch(model, names, lambda: whole(input_ids=ids))
    return seen, paths


def _core(seen: Seen, others: list[Seen | None]) -> CoreSeen:
    module, given, result = seen.first[0]
    obstacle = _obstacle(seen, given, result, others)
    known = [other for other in others if other is not None]
    tensors = [] if obstacle else [_tensor(name, t, known) for name, t in tensors_of(seen, module, given).items()]
    return CoreSeen(
        function=seen.function,
        source=_source(seen.original) if seen.function else "",
        tensors=tensors,
        constants={n: repr(v) for n, v in given.items() if not isinstance(v, Tensor)} if not obstacle else {},
        outputs=[] if obstacle else [None if o is None else list(o.shape) for o in outputs_of(result)],
        single=isinstance(result, Tensor),
        calls=known[0].calls if known else seen.calls,
        operators=_law([other.operators for other in known]),
        moved=_law([other.moved for other in known]),
        obstacle=obstacle,
    )


def _obstacle(seen: Seen, given: dict[str, Any], result: Any, others: list[Seen | None]) -> str:
    strange = [n for n, v in given.items() if not isinstance(v, Tensor | bool | int | float | type(None))]
    if strange:
        return f"it is called with {', '.join(f'{n} ({type(given[n]).__name__})' for n in strange)}"
    if any(other is None for other in others):
        return "the published model does not call it"
    try:
        if not any(isinstance(o, Tensor) for o in outputs_of(result)):
            return "it returns no tensor"
    except ValueError as error:
        return str(error)
    return ""


def _tensor(name: str, tensor: Tensor, others: list[Seen]) -> TensorSeen:
    shapes, dtype = [], tensor.dtype
    for other in others:
        module, given, _ = other.first[0]
        there = tensors_of(other, module, given)[name]
        shapes.append(tuple(there.shape))
        dtype = there.dtype
    step = LENGTHS[1] - LENGTHS[0]
    sizes = []
    for first, second in zip(shapes[0], shapes[1], strict=True):
        each, rest = divmod(second - first, step)
        if rest:
            raise ValueError(f"the size of {name} does not grow with the tokens")
        sizes.append((first - each * LENGTHS[0], each))
    wide = tensor.double()
    return TensorSeen(
        argument=name,
        dtype=str(dtype).removeprefix("torch."),
        twin=list(tensor.shape),
        sizes=sizes,
        mean=float(wide.mean()) if tensor.numel() else 0.0,
        spread=float(wide.std(correction=0)) if tensor.numel() else 1.0,
        low=float(wide.min()) if tensor.numel() else 0.0,
        high=float(wide.max()) if tensor.numel() else 0.0,
    )


def _law(values: list[int]) -> tuple[float, float, float]:
    if len(values) < len(LENGTHS):
        return (0.0, 0.0, 0.0)
    square, linear, constant = np.polyfit(LENGTHS, values, 2)
    return (float(constant), float(linear), float(square))


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)[: facts.LONGEST_SOURCE]
    except (OSError, TypeError):
        return ""


# ---- proving --------------------------------------------------------------------------------------------------------


def prove(
    config: dict[str, Any], plan: str, module: dict[str, Any], proposal: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """Try a proposal on the twin: values and gradients, on what the model feeds it, on others, at other sizes."""
    seen_module = NovelModule.model_validate(module)
    claim = OperatorProposal.model_validate(proposal)
    try:
        spec = facts.spec_of(seen_module, claim, tokens)
    except ValueError as error:
        return facts.Proof(proven=False, reasons=[str(error)]).model_dump()
    calls = [s for s in _on_twin(plan, [seen_module.name])[1] if s.function == claim.function]
    if not calls:
        return facts.Proof(proven=False, reasons=["the twin does not call it"]).model_dump()
    return _Trial(calls[0], claim, spec).run().model_dump()


class _Trial:
    """One proposal against the model's own code, in float64."""

    def __init__(self, seen: Seen, claim: OperatorProposal, spec: NovelSpec) -> None:
        self.seen, self.claim, self.spec = seen, claim, spec
        self.call: Signature = spec.call
        self.reference = _loaded(spec.source, self.call)
        self.worst, self.checks, self.reasons = 0.0, 0, list[str]()

    def run(self) -> facts.Proof:
        for number, (module, given, result) in enumerate(self.seen.first):
            try:
                self._one(module, given, result, number)
            except Exception as error:
                self.reasons.append(f"{type(error).__name__}: {error}"[:600])
            if self.reasons:
                break
        return facts.Proof(
            proven=not self.reasons and self.checks > 0,
            error=self.worst if self.checks else None,
            checks=self.checks,
            reasons=self.reasons,
        )

    def _one(self, module: nn.Module, given: dict[str, Any], result: Any, number: int) -> None:
        tensors = tensors_of(self.seen, module, given)
        named = {c.name: tensors[c.argument].detach() for c in self.claim.inputs}
        dims = self.call.bind({n: tuple(t.shape) for n, t in named.items()})
        self._constants(given, dims)
        if [o.name != "None" for o in self.claim.outputs] != [o is not None for o in outputs_of(result)]:
            self.reasons.append(f"it returns {len(outputs_of(result))} values, tensors or None otherwise than claimed")
        if self.reasons:
            return
        generator = torch.Generator().manual_seed(71 + number)
        for factor in (0.0, *FACTORS):
            fresh = {n: _moved(t, factor, generator) for n, t in named.items()}
            self._compare(module, given, fresh, f"on values like the model's (noise {factor:g})", generator)
        if not self.reasons:
            self._other_sizes(module, given, named, dims, generator)

    def _constants(self, given: dict[str, Any], dims: dict[str, int]) -> None:
        for constant in self.claim.constants:
            value, actual = facts.constant_of(constant.value, dims), given[constant.argument]
            alike = value == actual or (
                isinstance(value, float)
                and isinstance(actual, int | float)
                and not isinstance(actual, bool)
                and abs(value - actual) <= 1e-6 * max(abs(actual), 1e-30)
            )
            if not alike:
                self.reasons.append(f"{constant.argument} is {actual!r}, the claim {constant.value} gives {value!r}")

    def _other_sizes(
        self, module: nn.Module, given: dict[str, Any], named: dict[str, Tensor], dims: dict[str, int], generator: Any
    ) -> None:
        """The core called with one dim changed, and with the constants that the claim says come with it.

        Every dim has to be changed once: a claim that holds at the twin's sizes only would be wrong in the published
        model.
        """
        for name, size in dims.items():
            tried = 0
            for other in (1, size + 3):
                sizes = {**dims, name: other}
                fresh = {e.name: _like(named[e.name], e.sizes(sizes), generator) for e in self.call.inputs}
                constants = {c.argument: facts.constant_of(c.value, sizes) for c in self.claim.constants}
                try:
                    self._truth(module, {**given, **constants}, fresh)
                except Exception:  # the size belongs to the module
                    continue
                self._compare(module, {**given, **constants}, fresh, f"at {name} = {other}", generator)
                tried += 1
            if not tried:
                self.reasons.append(f"its code runs at {name} = {size} only: nothing shows how it depends on {name}")

    def _compare(
        self, module: nn.Module, given: dict[str, Any], fresh: dict[str, Tensor], where: str, generator: Any
    ) -> None:
        mine = _leaves(fresh)
        theirs = _leaves(fresh)
        own = self._truth(module, given, theirs)
        try:
            claimed = self.reference(mine)
        except (Exception, SystemExit) as error:
            self.reasons.append(f"{where} the reference raises {type(error).__name__}: {error}"[:600])
            return
        claimed = (
            [claimed]
            if isinstance(claimed, Tensor)
            else list(claimed.values() if isinstance(claimed, dict) else claimed)
        )
        names = [o.name for o in self.claim.outputs if o.name != "None"]
        if [tuple(o.shape) for o in claimed] != [tuple(o.shape) for o in own]:
            shapes = [list(o.shape) for o in claimed], [list(o.shape) for o in own]
            self.reasons.append(f"{where} the reference returns shapes {shapes[0]}, the module's code {shapes[1]}")
            return
        noise = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in own]
        pairs = dict(zip(names, zip(claimed, own, strict=True), strict=True))
        leaves = [n for n, t in mine.items() if t.requires_grad]
        gradients = [
            _gradients(outputs, noise, [side[n] for n in leaves]) for outputs, side in ((claimed, mine), (own, theirs))
        ]
        pairs |= {f"grad {n}": (a, b) for n, a, b in zip(leaves, *gradients, strict=True)}
        self.checks += 1
        for name, (a, b) in pairs.items():
            off = _error(a, b)
            self.worst = max(self.worst, off)
            if not off <= CLOSE:
                self.reasons.append(f"{where} {name} is off by {off:.2g} of its size")

    def _truth(self, module: nn.Module, given: dict[str, Any], named: dict[str, Tensor]) -> list[Tensor]:
        """The module's own code on other tensors."""
        by_argument = {c.argument: named[c.name] for c in self.claim.inputs}
        arguments = {n: by_argument.get(n, v) for n, v in given.items()}
        held = {n.removeprefix(OWN): t for n, t in by_argument.items() if n.startswith(OWN)}
        parameters = {n: t for n, t in held.items() if n in dict(module.named_parameters())}
        with parameters_as(module, parameters), torch.enable_grad():
            function = self.seen.original if self.seen.function else type(module).forward
            args = () if self.seen.function else (module,)
            found = outputs_of(function(*args, **arguments))
        return [o for o in found if o is not None]


def _loaded(source: str, call: Signature) -> Callable[[dict[str, Tensor]], Any]:
    module = types.ModuleType("claim")
    exec(compile(source, "claim.py", "exec"), module.__dict__)
    return entry_point(module, call)


def _moved(tensor: Tensor, factor: float, generator: Any) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return tensor.double() + factor * float(tensor.double().std(correction=0) or 1.0) * noise


def _like(tensor: Tensor, shape: tuple[int, ...], generator: Any) -> Tensor:
    """Values of another shape drawn from those of a tensor."""
    flat = tensor.detach().reshape(-1)
    places = torch.randint(flat.numel(), shape, generator=generator)
    return _moved(flat[places], NOISE, generator)


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}


def _gradients(outputs: list[Tensor], noise: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    total = sum(
        ((o.double() * z).sum() for o, z in zip(outputs, noise, strict=True) if o.requires_grad), torch.zeros(())
    )
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def _error(actual: Tensor, expected: Tensor) -> float:
    size = float(expected.double().square().mean().sqrt()) if expected.numel() else 0.0
    off = float((actual.double() - expected.double()).square().mean().sqrt()) if expected.numel() else 0.0
    if off != off or size != size:
        return float("inf")
    return off / size if size > 1e-30 else (0.0 if off <= 1e-12 else float("inf"))
