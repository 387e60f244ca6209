"""Judging an operator that has no family: its reference runs in its own sandbox, its cases come from its signature.

:class:`NovelFamily` stands where a family's ``reference``, ``template`` and ``cases`` modules stand, so that the judge
treats a novel operator like any other. The reference is untrusted code: it runs in a confined process beside the judge
(never in the candidate's), which sees inputs only. Its own error comes from running it in fp32 with the operands of
matrix products rounded to the storage dtype and the outputs rounded once.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_templates import registry
from kernel_templates.case import Case
from kernel_templates.novel import ACTIVATION, NOVEL, NovelSpec, TensorSignature, Values, size_of
from kernel_templates.spec import OperatorSpec
from onboarding.problem import Problem
from onboarding.sandbox import Limits, Sandbox
from onboarding.stages.generate.compose import ComposeError, stated_tables
from onboarding.stages.judge import images
from onboarding.stages.judge.examinee import Examinee, Refusal
from onboarding.stages.judge.oracle import TEMPLATES

CHILD = "onboarding.stages.judge.novel_child"
LIMITS = Limits(wall_s=1800.0, memory_bytes=8 * 2**30, output_bytes=8 * 2**20)
ANSWER_S = 120.0
ELEMENTS = {"interpreted": 12_000, "compiled": 4_000_000}
"""Most elements that the inputs of one case may have together."""
SPREADS = {"normal": 1.0, "small": 0.25, "wide": 2.0, "shifted": 1.0}
"""What a case multiplies the normal values of its signature by; ``shifted`` moves their mean by half a spread."""
WITH_EMPTY = 6
"""Cases from which on one is empty."""
_ODD = (1, 2, 3, 5, 7, 15, 17, 31, 33, 47, 63, 65, 96, 127, 129, 200, 255, 257)

Tensors = dict[str, Tensor | None]


class Evaluator:
    """The confined process that runs one reference; started when first asked."""

    def __init__(self, spec: NovelSpec, folder: Path, *, unsafe: bool = False) -> None:
        self.spec, self.folder, self.unsafe = spec, folder, unsafe
        self._examinee: Examinee | None = None
        self._lock = threading.Lock()

    def evaluate(
        self, tensors: dict[str, Tensor], needs: frozenset[str], upstream: dict[str, Tensor], rounded: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Outputs, and gradients of ``needs`` where there is an ``upstream``; all on the CPU, in the inputs' dtype.

        Raises:
            Problem: ``reference-failed``: the reference raises, dies, or returns what its signature does not say.
        """
        with self._lock:
            try:
                return self._ask(tensors, needs, upstream, rounded)
            except Refusal as failure:
                raise self._failed(str(failure)) from failure
            except images.ImageError as failure:
                raise self._failed(f"what it returned cannot be read: {failure}") from failure

    def close(self) -> None:
        """End the process."""
        if self._examinee is not None:
            self._examinee.close()
            self._examinee = None

    def _failed(self, why: str) -> Problem:
        return Problem("reference-failed", f"the reference of {self.spec.name} cannot be run", why)

    def _started(self) -> Examinee:
        if self._examinee is None:
            sandbox = Sandbox(unsafe=self.unsafe)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._examinee = Examinee(sandbox, self.folder, "cpu", LIMITS, ANSWER_S, child=CHILD)
            self._examinee.ready()
            source = self._examinee.given / "reference.py"
            source.write_text(self.spec.source)
            source.chmod(0o644)
            self._examinee.ask({"kind": "load", "source": str(source), "signature": self.spec.signature})
        return self._examinee

    def _ask(
        self, tensors: dict[str, Tensor], needs: frozenset[str], upstream: dict[str, Tensor], rounded: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        examinee = self._started()
        activations = {t.name for t in self.spec.call.inputs if t.dtype == ACTIVATION}
        request: dict[str, Any] = {"kind": "evaluate", "out": str(examinee.work), "rounded": rounded}
        request["tensors"] = {
            n: _send(t, examinee.given / f"input.{n}") | {"requires_grad": n in needs, "activation": n in activations}
            for n, t in tensors.items()
        }
        request["upstream"] = {n: _send(t, examinee.given / f"upstream.{n}") for n, t in upstream.items()}
        answer = examinee.ask(request)
        dims = self.spec.call.bind({n: tuple(t.shape) for n, t in tensors.items()})
        wide = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
        outputs = {}
        for entry in self.spec.call.outputs:
            dtype = wide if entry.is_float else getattr(torch, entry.dtype)
            outputs[entry.name] = self._receive(
                answer["outputs"], entry.name, examinee.work / f"output.{entry.name}", entry.sizes(dims), dtype
            )
        gradients = {
            n: self._receive(answer["gradients"], n, examinee.work / f"gradient.{n}", tuple(tensors[n].shape), wide)
            for n in (needs if "gradients" in answer else ())
        }
        return outputs, gradients

    def _receive(self, facts: Any, name: str, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        said = facts.get(name) if isinstance(facts, dict) else None
        kind = str(dtype).removeprefix("torch.")
        if not isinstance(said, dict) or said.get("shape") != list(shape) or said.get("dtype") != kind:
            raise Refusal(f"its {name} is {said}, not {kind} {list(shape)}")
        value = images.load(path, dtype, math.prod(shape)).reshape(shape)
        if dtype.is_floating_point and not bool(value.isfinite().all()):
            raise Refusal(f"its {name} is not finite")
        return value


def _send(tensor: Tensor, path: Path) -> dict[str, Any]:
    images.save(tensor.detach().cpu().contiguous().reshape(-1), path)
    return {
        "file": str(path),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


class _Bridge(torch.autograd.Function):
    """One evaluation in the other process as a differentiable function of this one."""

    @staticmethod
    def forward(ctx: Any, evaluator: Evaluator, names: tuple[str, ...], rounded: str, *values: Tensor) -> Any:
        ctx.evaluator, ctx.names, ctx.rounded = evaluator, names, rounded
        ctx.save_for_backward(*values)
        ctx.set_materialize_grads(False)
        outputs, _ = evaluator.evaluate(dict(zip(names, values, strict=True)), frozenset(), {}, rounded)
        integers = [t for t in outputs.values() if not t.is_floating_point()]
        ctx.mark_non_differentiable(*integers)
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        needs = frozenset(n for n, need in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if need)
        named = zip((t.name for t in ctx.evaluator.spec.call.outputs), grads, strict=True)
        upstream = {n: g for n, g in named if g is not None}
        _, found = ctx.evaluator.evaluate(tensors, needs, upstream, ctx.rounded)
        return (None, None, None, *(found.get(n) for n in ctx.names))


class NovelFamily:
    """What the judge asks a family for, answered from a novel spec."""

    def __init__(self) -> None:
        self._open: dict[str, Evaluator] = {}

    @contextmanager
    def opened(self, spec: OperatorSpec, folder: Path, *, unsafe: bool = False) -> Iterator[None]:
        """While open, references of ``spec`` can be evaluated; does nothing for an operator of a family."""
        if not isinstance(spec, NovelSpec):
            yield
            return
        evaluator = Evaluator(spec, folder, unsafe=unsafe)
        self._open[_identity(spec)] = evaluator
        try:
            yield
        finally:
            del self._open[_identity(spec)]
            evaluator.close()

    # ---- reference.py --------------------------------------------------------------------------------------------

    def reference(self, tensors: Tensors, spec: NovelSpec) -> dict[str, Tensor]:
        """The reference's outputs, in the dtype of its floating inputs."""
        return self._evaluate(tensors, spec, "")

    def rounded_reference(
        self, tensors: Tensors, spec: NovelSpec, mma_dtype: torch.dtype, config: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The same with operands of matrix products, inputs and outputs rounded to ``mma_dtype``."""
        return self._evaluate(tensors, spec, str(mma_dtype).removeprefix("torch."))

    def _evaluate(self, tensors: Tensors, spec: NovelSpec, rounded: str) -> dict[str, Tensor]:
        evaluator = self._open[_identity(spec)]
        given = {n: t.cpu() for n, t in tensors.items() if t is not None}
        values = _Bridge.apply(evaluator, tuple(given), rounded, *given.values())  # type: ignore[no-untyped-call]
        return dict(zip((t.name for t in spec.call.outputs), values, strict=True))

    # ---- template.py ---------------------------------------------------------------------------------------------

    def outputs_like(
        self, tensors: Tensors, spec: NovelSpec, config: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Empty contiguous outputs as the signature promises them."""
        given = {n: t for n, t in tensors.items() if t is not None}
        device = next(iter(given.values())).device
        dims = spec.call.bind({n: tuple(t.shape) for n, t in given.items()})
        activation = next((given[t.name].dtype for t in spec.call.inputs if t.dtype == ACTIVATION), torch.float32)
        outputs = {
            t.name: torch.empty(
                t.sizes(dims), dtype=activation if t.dtype == ACTIVATION else getattr(torch, t.dtype), device=device
            )
            for t in spec.call.outputs
        }
        return outputs, {}

    def bucket(self, tensors: Tensors, spec: NovelSpec) -> dict[str, int]:
        """One configuration serves all sizes."""
        return {}

    # ---- cases.py ------------------------------------------------------------------------------------------------

    def cases(self, spec: NovelSpec, rng: random.Random, count: int, level: str) -> list[Case]:
        """Odd and published sizes from the signature, within the level's budget of elements, and an empty call."""
        found = []
        for number in range(count):
            distribution = "normal" if number % 2 == 0 else rng.choice(sorted(SPREADS))
            dims = self._sizes(spec, rng, ELEMENTS[level] if number % 3 else ELEMENTS[level] // 2)
            words = ", ".join(f"{name} {size}" for name, size in dims.items())
            found.append(
                Case(name=f"{number}: {words}, {distribution}", dims=dims, dtype=spec.dtype, distribution=distribution)
            )
        if count >= WITH_EMPTY and (empty := self._empty(spec)) is not None:
            found[-1] = empty
        return found

    def _empty(self, spec: NovelSpec) -> Case | None:
        """A call without elements, if the reference is defined for one."""
        dims = dict(self.typical(spec).dims)
        leading = [size for t in spec.call.inputs for size in t.shape if isinstance(size, str)]
        free = [n for n in leading if n in dims and spec.call.dims[n].least <= 1 and not spec.call.dims[n].choices]
        if not free:
            return None
        case = Case(name=f"empty: {free[0]} 0", dims={**dims, free[0]: 0}, dtype=spec.dtype, distribution="normal")
        tensors = self.make_tensors(spec, case, torch.Generator().manual_seed(0), torch.float32, "cpu")
        try:
            self.reference(tensors, spec)
        except Problem:
            return None
        return case

    def typical(self, spec: NovelSpec) -> Case:
        """One small case with odd sizes, always the same."""
        sizes = self._sizes(spec, random.Random(7), ELEMENTS["interpreted"] // 4)
        words = ", ".join(f"{name} {size}" for name, size in sizes.items())
        return Case(name=words, dims=sizes, dtype=spec.dtype)

    def _sizes(self, spec: NovelSpec, rng: random.Random, most: int) -> dict[str, int]:
        signature = spec.call
        sizes = {}
        for name, dim in signature.dims.items():
            largest = dim.most or dim.full
            choices = dim.choices or [s for s in {*_ODD, dim.full, largest} if dim.least <= s <= largest]
            sizes[name] = rng.choice(sorted(choices or [max(dim.least, 1)]))
        while sum(math.prod(t.sizes(sizes)) for t in signature.inputs) > most:
            # too large for this level: the size that can give most is drawn anew, smaller
            smaller = {
                name: [c for c in (dim.choices or (*_ODD, max(dim.least, 1))) if dim.least <= c < sizes[name]]
                for name, dim in signature.dims.items()
            }
            able = [name for name, found in smaller.items() if found]
            if not able:
                break
            name = max(able, key=lambda n: sizes[n] / max(1, max(smaller[n])) * rng.uniform(0.5, 1.0) * sizes[n])
            sizes[name] = rng.choice(sorted(smaller[name]))
        return sizes

    def make_tensors(
        self,
        spec: NovelSpec,
        case: Case,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensors:
        """Values for every input of the signature."""
        tensors: Tensors = {}
        for entry in spec.call.inputs:
            shape = entry.sizes(case.dims)
            value = _draw(entry, shape, case, generator)
            kind = dtype if entry.dtype == ACTIVATION else getattr(torch, entry.dtype)
            tensors[entry.name] = value.to(device=device, dtype=kind)
        return tensors


def _draw(entry: TensorSignature, shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    values: Values = entry.values
    place = generator.device
    if values.kind in ("integers", "distinct"):
        high = int(size_of(values.high, case.dims) if isinstance(values.high, str) else values.high)
        if values.kind == "integers":
            return torch.randint(int(values.low), max(high, 1), shape, generator=generator, device=place)
        scores = torch.rand((*shape[:-1], high), generator=generator, device=place)
        return scores.argsort(-1)[..., : shape[-1]]
    if values.kind == "uniform":
        top = float(case.dims[values.high] if isinstance(values.high, str) else values.high)
        return values.low + (top - values.low) * torch.rand(shape, generator=generator, device=place)
    spread = values.spread * SPREADS[case.distribution]
    mean = values.mean + (0.5 * spread if case.distribution == "shifted" else 0.0)
    normal = mean + spread * torch.randn(shape, generator=generator, device=place)
    if values.kind == "log_sigmoid":
        return torch.nn.functional.logsigmoid(normal)
    return normal.softmax(-1) if values.kind == "softmax" else normal


def _identity(spec: NovelSpec) -> str:
    """The operator whatever its dtype: trials judge some cases in fp32."""
    return spec.resized(dtype="float32").digest()


FAMILY = NovelFamily()
registry.add_adapter(NOVEL, FAMILY)


def configs_for(spec: OperatorSpec, source: bytes, folder: Path) -> Path:
    """The family's folder of configurations, or one made of what a novel candidate states.

    Raises:
        Refusal: it states none.
    """
    if not isinstance(spec, NovelSpec):
        return TEMPLATES / spec.family / "configs"
    try:
        tables = stated_tables(source.decode())
    except (ComposeError, UnicodeDecodeError) as wrong:
        raise Refusal(str(wrong)) from wrong
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (folder / f"{table['device']}.json").write_text(json.dumps(table))
    return folder
