"""Turns a candidate (or a template with a spec) into one ``torch.library`` custom op.

The op has a schema made from the candidate's ``INPUTS`` and ``OUTPUTS``, a fake kernel, an autograd formula and a
contiguity policy, and works under ``torch.compile``. Internally it returns the outputs followed by what backward
needs, so that saved tensors are ordinary results; callers see the outputs only.

Policy
    Inputs and incoming gradients may have any strides; kernels see contiguous tensors. The copy is made inside the
    op, so what autograd keeps alive is the caller's tensor. Results never alias inputs or each other. Only needed
    gradients are computed, each in its input's dtype; a missing incoming gradient reaches the kernel as None.

Traits
    A candidate may say more about itself in ``TRAITS`` (a template: ``traits(spec)``), to save memory and traffic:
    ``shared_gradients`` {input: other input that has the very same gradient}, ``saved_outputs`` (outputs that
    backward reads, kept without a copy) and ``unread_inputs`` (inputs of which backward needs shape and dtype only).

Self-contained (torch only): bundles carry a copy of this file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "onboard"

Tensors = dict[str, Tensor | None]
ChooseConfig = Callable[[dict[str, int], torch.device], dict[str, Any]]

_taken: set[str] = set()


def bind_template(template: Any, spec: Any) -> SimpleNamespace:
    """A template module with its ``spec`` filled in: the same interface that a candidate module has."""

    def role(tensor_role: Any) -> str:
        words = ("differentiable" * tensor_role.differentiable, "optional" * tensor_role.optional)
        return " ".join(filter(None, words))

    return SimpleNamespace(
        FAMILY=spec.family,
        SPEC=spec.to_dict(),
        INPUTS={r.name: role(r) for r in spec.inputs()},
        OUTPUTS={r.name: role(r) for r in spec.outputs()},
        TRAITS=template.traits(spec) if hasattr(template, "traits") else {},
        outputs_like=lambda tensors, config: template.outputs_like(tensors, spec, config),
        forward=lambda tensors, config: template.forward(tensors, spec, config),
        backward=lambda tensors, saved, grads, needs, config: template.backward(
            tensors, saved, grads, needs, spec, config
        ),
        bucket=lambda tensors: template.bucket(tensors, spec),
    )


def bind(candidate: Any, *, name: str, choose_config: ChooseConfig) -> Operator:
    """Register the candidate as a custom op.

    Args:
        candidate: module with ``INPUTS``, ``OUTPUTS``, ``outputs_like``, ``forward``, ``backward``, ``bucket``.
        name: name of the op; characters that an op may not have become underscores, and a name that is taken in
            this process gets a number.
        choose_config: (bucket, device) -> configuration.
    """
    return Operator(candidate, name, choose_config)


class Operator:
    """A bound operator: call it with tensors by name, get the tuple of outputs."""

    def __init__(self, candidate: Any, name: str, choose_config: ChooseConfig) -> None:
        self.candidate = candidate
        self.choose_config = choose_config
        self.inputs = tuple(candidate.INPUTS)
        self.outputs = tuple(candidate.OUTPUTS)
        traits = getattr(candidate, "TRAITS", {})
        self.shared: dict[str, str] = dict(traits.get("shared_gradients", {}))
        self.saved_outputs: tuple[str, ...] = tuple(traits.get("saved_outputs", ()))
        self.unread: frozenset[str] = frozenset(traits.get("unread_inputs", ()))
        self.name = _free_name(name)
        self._optional = {n for n, role in candidate.INPUTS.items() if "optional" in role}
        self._differentiable = {n for n, role in candidate.INPUTS.items() if "differentiable" in role}
        self._saved_names: dict[Any, tuple[str, ...]] = {}
        self._register()

    def __call__(self, **tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Run the operator. Optional inputs may be None or missing.

        Raises:
            TypeError: an input is missing or unknown.
        """
        unknown = tensors.keys() - set(self.inputs)
        missing = [n for n in self.inputs if tensors.get(n) is None and n not in self._optional]
        if unknown or missing:
            wrong = [f"no input {n!r}" for n in sorted(unknown)] + [f"{n!r} is missing" for n in missing]
            raise TypeError(f"{self.name}: {'; '.join(wrong)}")
        results = self._forward_op(*(tensors.get(n) for n in self.inputs))
        return tuple(results[: len(self.outputs)])

    def config(self, **tensors: Tensor | None) -> dict[str, Any]:
        """The configuration that a call with these tensors uses."""
        return self._config(tensors)

    # ---- registration -----------------------------------------------------------------------------------------

    def _register(self) -> None:
        arguments = ", ".join(f"Tensor{'?' * (n in self._optional)} {n}" for n in self.inputs)
        forward = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}", self._forward, mutates_args=(), schema=f"({arguments}) -> Tensor[]"
        )
        backward = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}_backward",
            self._backward,
            mutates_args=(),
            schema="(Tensor?[] inputs, Tensor[] saved, Tensor?[] grads, bool[] needs) -> Tensor[]",
        )
        forward.register_fake(self._fake_forward)
        backward.register_fake(self._fake_backward)
        forward.register_autograd(self._gradients, setup_context=self._keep)
        # the overloads rather than the definitions: torch.compile sees plain operator calls
        self._forward_op = getattr(torch.ops, NAMESPACE).__getattr__(self.name).default
        self._backward_op = getattr(torch.ops, NAMESPACE).__getattr__(f"{self.name}_backward").default
        self._definitions = (forward, backward)

    # ---- forward ----------------------------------------------------------------------------------------------

    def _forward(self, *values: Tensor | None) -> list[Tensor]:
        tensors = self._contiguous(values)
        config = self._config(tensors)
        outputs, saved = self.candidate.forward(tensors, config)
        self._saved_names[_presence(tensors)] = self._extra(saved)
        return _without_aliases(self._results(outputs, saved), [t for t in values if t is not None])

    def _fake_forward(self, *values: Tensor | None) -> list[Tensor]:
        tensors = self._contiguous(values)
        return self._results(*self.candidate.outputs_like(tensors, self._config(tensors)))

    def _extra(self, saved: dict[str, Tensor]) -> tuple[str, ...]:
        """Names of the saved tensors that are not outputs."""
        return tuple(n for n in saved if n not in self.saved_outputs)

    def _results(self, outputs: dict[str, Tensor], saved: dict[str, Tensor]) -> list[Tensor]:
        return [outputs[n] for n in self.outputs] + [saved[n] for n in self._extra(saved)]

    # ---- backward ---------------------------------------------------------------------------------------------

    def _keep(self, ctx: Any, inputs: tuple[Tensor | None, ...], output: list[Tensor]) -> None:
        # without this, autograd would fill the gradients of saved tensors with zeros
        ctx.set_materialize_grads(False)
        by_name = dict(zip(self.inputs, inputs, strict=True))
        ctx.unread = {n: (t.shape, t.dtype, t.device) for n, t in by_name.items() if n in self.unread and t is not None}
        kept = [None if n in self.unread else t for n, t in by_name.items()]
        again = [output[self.outputs.index(n)] for n in self.saved_outputs]
        ctx.save_for_backward(*kept, *again, *output[len(self.outputs) :])

    def _gradients(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        inputs, saved = list(kept[: len(self.inputs)]), list(kept[len(self.inputs) :])
        upstream = list(grads[: len(self.outputs)])
        for n, (shape, dtype, device) in ctx.unread.items():
            # one element stands for all: backward only asks for the shape
            inputs[self.inputs.index(n)] = torch.empty((), dtype=dtype, device=device).expand(shape)
        wanted = {
            n
            for n, need, value in zip(self.inputs, ctx.needs_input_grad, inputs, strict=True)
            if need and value is not None and n in self._differentiable
        }
        if not wanted or all(g is None for g in upstream):
            return (None,) * len(self.inputs)
        by_name = dict(zip(self.inputs, inputs, strict=True))
        source = {n: self._gradient_source(n, by_name) for n in wanted}
        computed = [n for n in self.inputs if n in source.values()]
        results = self._backward_op(inputs, saved, upstream, [n in computed for n in self.inputs])
        gradients = dict(zip(computed, results, strict=True))
        return tuple(gradients[source[n]] if n in wanted else None for n in self.inputs)

    def _gradient_source(self, name: str, tensors: Tensors) -> str:
        """The input whose gradient equals that of ``name``: itself, unless the candidate says they are one tensor."""
        other = self.shared.get(name)
        mine, theirs = tensors[name], tensors[other] if other else None
        if other is None or mine is None or theirs is None:
            return name
        return other if mine.dtype == theirs.dtype and mine.shape == theirs.shape else name

    def _backward(
        self,
        inputs: Sequence[Tensor | None],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor]:
        tensors = self._contiguous(inputs, as_they_are=self.unread)
        config = self._config(tensors)
        names = self.saved_outputs + self._names_of_saved(tensors, config)
        upstream = {n: None if g is None else g.contiguous() for n, g in zip(self.outputs, grads, strict=True)}
        wanted = {n for n, need in zip(self.inputs, needs, strict=True) if need}
        found = self.candidate.backward(
            tensors, dict(zip(names, saved, strict=True)), upstream, frozenset(wanted), config
        )
        results = []
        for n in self.inputs:
            if n in wanted:
                like = tensors[n]
                assert like is not None
                gradient = found.get(n)
                results.append(like.new_zeros(like.shape) if gradient is None else gradient.to(like.dtype))
        known = [t for t in (*inputs, *saved, *grads) if t is not None]
        return _without_aliases(results, known)

    def _fake_backward(
        self,
        inputs: Sequence[Tensor | None],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor]:
        return [t.new_empty(t.shape) for t, need in zip(inputs, needs, strict=True) if need and t is not None]

    # ---- shared -----------------------------------------------------------------------------------------------

    def _contiguous(self, values: Sequence[Tensor | None], as_they_are: frozenset[str] = frozenset()) -> Tensors:
        return {
            n: t if t is None or n in as_they_are else t.contiguous() for n, t in zip(self.inputs, values, strict=True)
        }

    def _config(self, tensors: Tensors) -> dict[str, Any]:
        device = next(t.device for t in tensors.values() if t is not None)
        return self.choose_config(self.candidate.bucket(tensors), device)

    def _names_of_saved(self, tensors: Tensors, config: dict[str, Any]) -> tuple[str, ...]:
        key = _presence(tensors)
        if key not in self._saved_names:  # a compiled graph from another process may start with backward
            self._saved_names[key] = self._extra(self.candidate.outputs_like(tensors, config)[1])
        return self._saved_names[key]


def _presence(tensors: Tensors) -> tuple[bool, ...]:
    """Which inputs are there: what a candidate saves depends on nothing else."""
    return tuple(t is not None for t in tensors.values())


def _without_aliases(results: list[Tensor], known: list[Tensor]) -> list[Tensor]:
    """Copies of those results that share memory with an input or an earlier result."""
    seen = {t.untyped_storage().data_ptr() for t in known if t.numel()}
    fresh = []
    for result in results:
        address = result.untyped_storage().data_ptr()
        fresh.append(result.clone() if result.numel() and address in seen else result)
        seen.add(address)
    return fresh


def _free_name(name: str) -> str:
    plain = re.sub(r"\W", "_", name)
    for candidate in (plain, *(f"{plain}_{i}" for i in itertools.islice(itertools.count(2), 100_000))):
        if candidate not in _taken:
            _taken.add(candidate)
            return candidate
    raise ValueError(f"too many operators named {name}")
