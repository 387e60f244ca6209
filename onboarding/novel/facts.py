"""What is known of a novel module, what is proposed for it, and what a proof found. Free of torch.

A *core* is what a kernel may take over: a function of the definition's own file that the module's forward calls, or the
forward itself. Sizes are (constant, per token) pairs: the size at T tokens is ``constant + per token x T``.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from kernel_templates.novel import Dim, NovelSpec, Signature, TensorSignature, Values
from onboarding.architecture import Binding, OperatorUse, Record

LONGEST_SOURCE = 24_000
OWN = "self."
"""Before the name of a parameter of the module, where the core is the forward."""
_CONSTANT = re.compile(r"(?:([-+]?[0-9.]+(?:e[-+]?\d+)?)(?: \* )?)?(?:([A-Za-z]\w*)(?: \*\* ([-+]?[0-9.]+))?)?\Z")


class TensorSeen(Record):
    """One tensor that a core is called with."""

    argument: str
    """Parameter of the function, or ``self.NAME`` of the module's own."""
    dtype: str
    twin: list[int]
    """Shape in the reduced twin."""
    sizes: list[tuple[int, int]]
    """Of the published model."""
    mean: float = 0.0
    spread: float = 1.0
    low: float = 0.0
    high: float = 0.0

    def published(self, tokens: int) -> list[int]:
        """The shape in the published model at a length, batch 1."""
        return [constant + each * tokens for constant, each in self.sizes]


class CoreSeen(Record):
    """A function as it is called."""

    function: str
    """Empty: the module's forward."""
    source: str
    tensors: list[TensorSeen]
    constants: dict[str, str] = Field(default_factory=dict)
    """Argument -> value in the twin, as Python writes it."""
    outputs: list[list[int] | None]
    """Shapes in the twin, in the order of return; None for what is no tensor."""
    single: bool
    """It returns one tensor and no tuple."""
    calls: int
    """In one forward of the published model."""
    operators: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Torch operators of all calls of one forward, as a polynomial of the tokens."""
    moved: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Bytes that they move, in the same way."""
    obstacle: str = ""
    """Why no kernel can take it over; empty where one can."""


class NovelModule(Record):
    """A module class that matches no known role."""

    name: str
    target: str
    """``package.module:Class``."""
    paths: list[str]
    """In the published model."""
    source: str
    cores: list[CoreSeen]


class InputClaim(Record):
    """One input of a proposed operator."""

    name: str
    argument: str
    """Of the core: a parameter of the function, or ``self.NAME``."""
    shape: list[str]
    """A dim's name, a number, or ``K*NAME`` for each axis."""


class OutputClaim(Record):
    """One output of a proposed operator, in the order of return."""

    name: str
    """``None`` for a place where the core returns None."""
    shape: list[str]


class Constant(Record):
    """What an argument that is no tensor always is."""

    argument: str
    value: str
    """A literal, a dim, or ``factor * DIM ** power``."""


class OperatorProposal(Record):
    """A claim: this core computes that reference."""

    name: str
    """A few words."""
    function: str
    inputs: list[InputClaim]
    constants: list[Constant]
    outputs: list[OutputClaim]
    source: str
    """The reference in plain torch."""


class Proof(Record):
    """What came of trying a proposal on the twin."""

    proven: bool
    error: float | None = None
    """Largest relative error over outputs and gradients; None where nothing could be compared."""
    checks: int = 0
    reasons: list[str] = Field(default_factory=list)


class Named(Record):
    """What became of one novel module."""

    module: str
    outcome: str
    """``operator`` or ``own code``."""
    words: str
    """For people: what it was found to be, or why it stays with its own torch code."""
    digest: str = ""
    """Of the operator spec."""
    error: float | None = None
    checks: int = 0
    tries: int = 0


def own_code(module: str, why: str, tries: int = 0) -> Named:
    """A module that stays as it is."""
    words = f"novel, served by its own torch code: {why}"
    return Named(module=module, outcome="own code", words=words[:600], tries=tries)


def constant_of(value: str, dims: dict[str, int]) -> Any:
    """A constant's value for given dims.

    Raises:
        ValueError: it is neither a literal nor ``factor * DIM ** power`` with a known dim.
    """
    if value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[value]
    found = _CONSTANT.match(value.strip())
    if found is None or not value.strip() or (found[2] and found[2] not in dims):
        raise ValueError(f"{value[:60]!r} is no literal, dim, or factor * DIM ** power")
    result = float(found[1]) if found[1] else 1.0
    return result * float(dims[found[2]]) ** float(found[3] or 1.0) if found[2] else result


def core_of(module: NovelModule, proposal: OperatorProposal) -> CoreSeen:
    """The core that a proposal is about.

    Raises:
        ValueError: the module has none by that name, or none that a kernel can take over.
    """
    found = next((core for core in module.cores if core.function == proposal.function), None)
    if found is None:
        known = ", ".join(repr(core.function) for core in module.cores)
        raise ValueError(f"{module.name} calls no {proposal.function!r}; its cores: {known}")
    if found.obstacle:
        raise ValueError(f"{proposal.function or 'forward'}: {found.obstacle}")
    return found


def spec_of(module: NovelModule, proposal: OperatorProposal, tokens: int, dtype: str = "bfloat16") -> NovelSpec:
    """The operator spec of a proposal, its sizes and values read off the models.

    Raises:
        ValueError: names or shapes of the proposal do not fit what was seen.
    """
    core = core_of(module, proposal)
    seen = {tensor.argument: tensor for tensor in core.tensors}
    claimed = [claim.argument for claim in proposal.inputs]
    if sorted(claimed) != sorted(seen):
        raise ValueError(f"its tensors are {', '.join(sorted(seen))}, the proposal takes {', '.join(sorted(claimed))}")
    if {c.argument for c in proposal.constants} != set(core.constants):
        raise ValueError(f"its other arguments are {', '.join(sorted(core.constants)) or 'none'}")
    inputs = tuple(_input(claim, seen[claim.argument]) for claim in proposal.inputs)
    outputs = tuple(TensorSignature(name=o.name, shape=_shape(o.shape)) for o in proposal.outputs if o.name != "None")
    names = {size.rpartition("*")[2] for claim in proposal.inputs for size in claim.shape if not size.isdigit()}
    open_ended = Signature(dims={name: Dim(full=1) for name in sorted(names)}, inputs=inputs, outputs=outputs)
    open_ended.check()
    full = open_ended.bind({c.name: tuple(seen[c.argument].published(tokens)) for c in proposal.inputs})
    signature = Signature(dims={n: Dim(full=size) for n, size in full.items()}, inputs=inputs, outputs=outputs)
    signature.check()
    return NovelSpec(name=proposal.name[:60], source=proposal.source, signature=signature.to_json(), dtype=dtype)


def use_of(module: NovelModule, proposal: OperatorProposal, tokens: int) -> OperatorUse:
    """A proven proposal as an operator of the model, with its place.

    Raises:
        ValueError: see :func:`spec_of`.
    """
    spec, core = spec_of(module, proposal, tokens), core_of(module, proposal)
    attributes = {claim.name: claim.argument for claim in proposal.inputs}
    attributes |= {f"constant {c.argument}": c.value for c in proposal.constants}
    attributes["returns"] = " ".join(o.name for o in proposal.outputs)
    attributes["form"] = "tensor" if core.single else "tuple"
    binding = Binding(
        hook="novel",
        target=module.target,
        function=core.function or None,
        attributes=attributes,
        module_paths=module.paths,
    )

    def at(law: tuple[float, float, float]) -> float:
        return max(0.0, law[0] + law[1] * tokens + law[2] * tokens * tokens)

    # a backward of eager operators is about twice its forward
    return OperatorUse(
        digest=spec.digest(),
        spec=spec.to_dict(),
        words=spec.words(),
        role="novel",
        bindings=[binding],
        calls=core.calls,
        flops=0.0,
        bytes_moved=core.calls * spec.bytes_moved(1),
        eager_operators=round(3 * at(core.operators)),
        eager_bytes=3 * at(core.moved),
    )


def _input(claim: InputClaim, seen: TensorSeen) -> TensorSignature:
    integers = seen.dtype not in ("float32", "bfloat16", "float16", "float64")
    dtype = seen.dtype if integers or seen.dtype == "float32" else "activation"
    return TensorSignature(
        name=claim.name, shape=_shape(claim.shape), dtype=dtype, differentiable=not integers, values=_values(seen)
    )


def _values(seen: TensorSeen) -> Values:
    """A distribution like what the twin's tensor holds."""
    if seen.high <= 0.0 and seen.low < 0.0:
        return Values(kind="log_sigmoid", mean=2.0)
    if seen.low >= 0.0 and seen.high <= 1.0 and seen.high > seen.low:
        return Values(kind="uniform", low=round(seen.low, 3), high=max(round(seen.high, 3), 1e-3))
    spread = float(f"{seen.spread:.2g}")
    return Values(mean=float(f"{seen.mean:.2g}") if abs(seen.mean) > 0.2 * seen.spread else 0.0, spread=spread or 1.0)


def _shape(sizes: list[str]) -> tuple[int | str, ...]:
    return tuple(int(size) if size.isdigit() else size for size in sizes)
