"""Where a candidate could behave otherwise: sizes and values that its family's cases would not think of.

A kernel that is wrong only from 5,000 rows, or that clamps weights above 8, passes every small and ordinary case. Three
answers, none of which knows the fault beforehand:

- every size that the spec fixes is tried at its published value, every other at the largest that the level can pay for;
- numbers in the candidate's source are sizes one below, at and above which, numbers of elements and values at which, it
  is tried;
- values span magnitudes: some elements of an input are multiplied by up to 2^7 (2^3 in fp16), or are such a number.

What lies beyond the budget is not tried; the verdict names those numbers (:func:`beyond`).
"""

from __future__ import annotations

import ast
import dataclasses
import math
import random
from typing import Any

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.novel import Dim, NovelSpec
from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec
from onboarding.stages.judge.structure import CONTRACT

Tensors = dict[str, Tensor | None]

_TALLEST = {
    "norm": 6_500,
    "gated_activation": 6_500,
    "moe": 400,
    "linear_attention": 300,
    "linear_cross_entropy": 800,
    "attention_residual": 120,
}
_TALL = 1_000
"""Largest size of what a spec does not fix (rows, tokens, length), by family: one or two seconds of interpretation."""
_LITERAL = {"norm": 1 << 15, "gated_activation": 1 << 15}
"""Largest size that a number in the source can lead to, where it is larger: one program takes 128 rows."""
_MANY = 24
"""Rows of a case of published sizes; a smaller number of the source is passed by it anyway."""
_AT_PUBLISHED = 32
"""Times the elements of other cases that one of many rows at published sizes may have."""
_COMPILED = 1 << 17
_ELEMENTS = {"interpreted": 1 << 18, "compiled": 1 << 27}
"""Most elements that the largest input of one case may have; a size that the source names may take four times that."""
_PRODUCTS = 2
"""Numbers of the source, larger than any size, that are tried as numbers of elements."""
_HEADS = 8
"""Heads are independent of each other and each costs as much as the first."""
_BOUNDARY = {"norm": ("hidden",), "gated_activation": ("width",), "moe": ("experts", "hidden", "intermediate")}
"""Sizes of a spec that may be anything: tried at powers of two and beside them, where padding and bins end."""
_GROWING = ("rows", "tokens", "length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers in a candidate's code."""

    sizes: tuple[int, ...] = ()
    """Integers above 2, those of comparisons first."""
    values: tuple[float, ...] = ()
    """Absolute values of floats and integers between 2^-20 and 2^20, without 0 and 1."""


def numbers_in(source: bytes) -> Numbers:
    """Read the numbers of a candidate's code, constant expressions folded; none for what does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return Numbers()
    sizes: dict[int, int] = {}
    values: set[float] = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id in CONTRACT for target in statement.targets
        ):
            continue
        compared = {id(n) for c in ast.walk(statement) if isinstance(c, ast.Compare | ast.If) for n in ast.walk(c)}
        for node in ast.walk(statement):
            number = _constant(node) if isinstance(node, ast.expr) else None
            if number is None or not math.isfinite(number):
                continue
            if 2.0**-20 <= abs(number) <= 2.0**20 and abs(number) != 1:
                values.add(float(abs(number)))
            if number == int(number) and number > 2:
                rank = 0 if id(node) in compared else 1
                sizes[int(number)] = min(rank, sizes.get(int(number), rank))
    ordered = sorted(sizes, key=lambda size: (sizes[size], -size))
    return Numbers(sizes=tuple(ordered), values=tuple(sorted(values)))


def _constant(node: ast.expr, depth: int = 0) -> float | int | None:
    """The value of an expression of numbers; None for anything else or anything huge."""
    if isinstance(node, ast.Constant):
        value = node.value
        return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _constant(node.operand, depth)
        return None if inner is None else -inner
    if not isinstance(node, ast.BinOp) or depth > 8:
        return None
    left, right = _constant(node.left, depth + 1), _constant(node.right, depth + 1)
    if left is None or right is None:
        return None
    try:
        match node.op:
            case ast.Add():
                found = left + right
            case ast.Sub():
                found = left - right
            case ast.Mult():
                found = left * right
            case ast.Div():
                found = left / right
            case ast.FloorDiv():
                found = left // right
            case ast.Pow() if abs(right) <= 64 and abs(left) <= 64:
                found = left**right
            case ast.LShift() if 0 <= right <= 60:
                found = int(left) << int(right)
            case _:
                return None
    except (ArithmeticError, ValueError, TypeError):
        return None
    return found if isinstance(found, int | float) and abs(found) < 1e18 else None


# ---- sizes --------------------------------------------------------------------------------------------------------


def cases(
    spec: OperatorSpec, known: list[Case], count: int, numbers: Numbers, level: str, rng: random.Random
) -> list[Case]:
    """Further cases: the family's most telling one at other sizes, the rest of them as small as any known case.

    Args:
        known: cases of the family, the most telling first.
        count: how many of them are tried; numbers of the source add at most a third as many, at least two.
    """
    plain = [c for c in known if 0 not in c.dims.values() and not c.options.get("lengths")]
    if not plain:
        return []
    maker = _Maker(spec, plain, level)
    found = [*maker.published(), *maker.tall(rng), *maker.boundary(rng)]
    tallest = max((case.dims[maker.main] for case in found), default=0) if maker.main else 0
    for number in beyond(spec, numbers, level)[:_PRODUCTS]:
        found += maker.products(number)
    for number in [n for n in numbers.sizes if n <= _largest(spec, level)][: max(2, count // 3)]:
        cheap = spec.family in _LITERAL and number <= tallest
        for name in rng.sample(maker.free, 1) if cheap else maker.free[:1]:
            found += maker.resized({name: number}, f"number {number} of its source", 4)
            if number >= tallest:  # "from here on" is met by no other case
                found += maker.resized({name: number + 1}, f"number {number} of its source", 4)
        found += maker.many_at_published_sizes(number)
    return found


def beyond(spec: OperatorSpec, numbers: Numbers, level: str) -> list[int]:
    """Numbers of the source that are larger than any size that is tried."""
    return [n for n in numbers.sizes if n > _largest(spec, level)]


def _largest(spec: OperatorSpec, level: str) -> int:
    if level == "compiled":
        return _COMPILED
    return _LITERAL.get(spec.family, _TALLEST.get(spec.family, _TALL))


class _Maker:
    """Makes cases of one spec from the family's."""

    def __init__(self, spec: OperatorSpec, plain: list[Case], level: str) -> None:
        self.spec, self.plain, self.level = spec, plain, level
        names = [n for n in plain[0].dims if n not in spec.dim_names()]
        self.main = next((n for n in _GROWING if n in names), "")
        """The size that grows with the data, not a batch or a number of heads."""
        self.free = sorted(names, key=lambda n: n != self.main)

    def _dim(self, name: str) -> Dim | None:
        """What a novel operator's signature says of a size; None for a size of a family."""
        return self.spec.call.dims.get(name) if isinstance(self.spec, NovelSpec) else None

    def _smallest(self, name: str) -> int:
        dim = self._dim(name)
        return 1 if dim is None else min(dim.choices, default=max(1, dim.least))

    def _permits(self, name: str, size: int) -> bool:
        dim = self._dim(name)
        return dim is None or (size in dim.choices if dim.choices else size >= dim.least)

    def published(self) -> list[Case]:
        """The spec's sizes at their own values, together where that is small enough, else one after the other."""
        if self.level == "compiled":  # the families have them already
            return []
        dims = {n: min(s, _HEADS) if n.endswith("heads") else s for n, s in self.spec.dims().items()}
        own = {n: s for n, s in dims.items() if n in self.plain[0].dims}
        own = {n: s for n, s in own.items() if s > max(c.dims[n] for c in self.plain)}
        if not own:
            return []
        together = self.resized(own, "published sizes")
        found: list[Case] = []
        for name in () if together else own:
            if not any(case.dims[name] == own[name] for case in found):
                alone = self.resized({name: own[name]}, "published size")
                for other in own:  # a size that the spec allows beside another one only, as top_k beside experts
                    alone = alone or self.resized({name: own[name], other: own[other]}, "published size")
                found += alone
        return together or found

    def tall(self, rng: random.Random) -> list[Case]:
        """Many rows, tokens or steps."""
        if self.level == "compiled" or not self.main:
            return []
        most = _TALLEST.get(self.spec.family, _TALL)
        return self.resized({self.main: rng.randint(5 * most // 6, most)}, "tall")

    def many_at_published_sizes(self, number: int) -> list[Case]:
        """More rows than a number of the source at the spec's own sizes: a condition may ask for both."""
        if self.level == "compiled" or not self.main or number < _MANY:
            return []
        own = {n: s for n, s in self.spec.dims().items() if n in self.plain[0].dims and not n.endswith("heads")}
        why = f"number {number} of its source, at published sizes"
        return self.resized(own | {self.main: number + 1}, why, _AT_PUBLISHED)

    def products(self, number: int) -> list[Case]:
        """So many elements as a number of the source says, or a few more: of the published sizes and many rows."""
        own = {n: s for n, s in self.spec.dims().items() if n in self.plain[0].dims and 1 < s < number}
        if not self.main or not own:
            return []
        name = max(own, key=lambda n: own[n])
        rows = -(-number // own[name])
        if rows >= _largest(self.spec, self.level):
            return []
        exact = [rows, rows + 1] if number % own[name] == 0 else [rows]
        why = f"number {number} of its source, as a product"
        return [case for count in exact for case in self.resized({self.main: count, name: own[name]}, why, 4)]

    def boundary(self, rng: random.Random) -> list[Case]:
        """Beside a power of two in every size that allows it; the first below it, where bins are full, and at it."""
        first, *others = _BOUNDARY.get(self.spec.family, ("",))
        change = {first: (1 << rng.randint(2, 5)) - 1}
        change |= {n: (1 << rng.randint(2, 5)) + rng.choice((-1, 0, 1)) for n in others}
        if not first:
            return []
        full = self.resized(change, "boundary sizes")
        return full + self.resized(change | {first: change[first] + 1}, "boundary sizes")

    def resized(self, change: dict[str, int], why: str, times: int = 1) -> list[Case]:
        """The most telling case in the dims of the cheapest with some changed; none if forbidden or too large."""
        fixed = self.spec.dim_names()
        order = sorted(
            self.plain,
            key=lambda case: (
                min((s for n, s in case.dims.items() if n in fixed and n not in change), default=4) < 4,  # tells little
                math.prod(s for n, s in case.dims.items() if n not in change),
            ),
        )
        for small in order:
            dims = {n: self._smallest(n) for n in self.free}
            dims |= {n: s for n, s in small.dims.items() if n not in self.free}
            if self.main:
                dims[self.main] = min(20, max(small.dims[self.main], 3))
            dims = {n: (dims | change)[n] for n in small.dims}
            if not all(self._permits(n, size) for n, size in dims.items()):
                continue
            try:
                own: dict[str, Any] = {n: s for n, s in dims.items() if n in fixed}
                self.spec.resized(**own)
            except ValueError:
                continue
            words = ", ".join(f"{n} {s}" for n, s in dims.items())
            name = f"{why}: {words}, {self.plain[0].distribution}"
            case = dataclasses.replace(self.plain[0], name=name, dims=dims)
            most = times * _ELEMENTS[self.level]
            if _largest_input(self.spec, case, most) <= most:
                return [case]
        return []


def _largest_input(spec: OperatorSpec, case: Case, most: int) -> float:
    """Elements of the largest input of a case; infinite where the family cannot make it, or far above ``most``."""
    if math.prod(sorted(case.dims.values())[-3:]) > 16 * most:
        return math.inf
    try:
        make = family_module(spec.family, "cases").make_tensors
        made = make(spec, case, torch.Generator().manual_seed(0), torch.float32, torch.device("cpu"))
    except (ValueError, RuntimeError, TypeError):
        return math.inf
    return max((t.numel() for t in made.values() if t is not None), default=0)


# ---- values -------------------------------------------------------------------------------------------------------


def spread(
    tensors: Tensors, turn: int, values: tuple[float, ...], rng: random.Random, generator: torch.Generator
) -> tuple[Tensors, str]:
    """The inputs with one that spans magnitudes; and in words what was done.

    One input at a time: what is planted in several would hide behind the largest. Signs stay, and probabilities and
    normed rows only become smaller: the operator's domain may end there.

    Args:
        turn: chooses the input.
        values: numbers of the source, at and around which some elements are placed.
    """
    able = [n for n, t in tensors.items() if t is not None and t.is_floating_point() and t.numel() > 1]
    if not able:
        return tensors, ""
    name = able[turn % len(able)]
    tensor = tensors[name]
    assert tensor is not None
    return {**tensors, name: _planted(tensor, values, rng, generator)}, f"wide values of {name}"


def _planted(tensor: Tensor, values: tuple[float, ...], rng: random.Random, generator: torch.Generator) -> Tensor:
    flat = tensor.double().reshape(-1).clone()
    device = generator.device
    order = torch.randperm(flat.numel(), generator=generator, device=device).to(flat.device)
    count = min(flat.numel(), 4 + flat.numel() // 100)
    if _bounded(tensor):
        where = order[:count]
        flat[where] *= torch.exp2(-10.0 * torch.rand(count, generator=generator, device=device)).to(flat)
        return flat.reshape(tensor.shape).to(tensor.dtype)
    # of either sign, if the values have both
    signs = flat[order].sign()
    halves = [order[signs > 0], order[signs < 0]]
    where = torch.cat([half[: (count + 1) // 2] for half in halves])
    top = 3.0 if tensor.dtype is torch.float16 else 7.0
    exponents = top * torch.rand(len(where), generator=generator, device=device)
    exponents[::2] = top * (0.7 + 0.3 * exponents[::2] / top)
    size = float(flat.square().mean().sqrt())
    planted = size * torch.exp2(exponents).to(flat)
    fitting = [v for v in values if 2.0**-6 * size <= v <= 2.0**top * size]
    for i in range(1, len(where) if fitting else 0, 2):
        planted[i] = rng.choice(fitting) * rng.choice((0.75, 1.0, 1.25))
    flat[where] = planted * flat[where].sign()
    return flat.reshape(tensor.shape).to(tensor.dtype)


def _bounded(tensor: Tensor) -> bool:
    """Whether all values lie in [0, 1], or all rows have norm 1."""
    wide = tensor.double()
    if float(wide.min()) >= 0.0 and float(wide.max()) <= 1.0:
        return True
    norms = wide.norm(dim=-1) if tensor.ndim else wide.abs()
    return bool((norms - 1.0).abs().max() < 0.03)
