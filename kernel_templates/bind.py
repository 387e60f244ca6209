"""Turns a candidate (or a template with a spec) into one differentiable operator with two equal paths.

Graph path
    A ``torch.library`` custom op with a schema made from the candidate's ``INPUTS`` and ``OUTPUTS``, a fake kernel and
    an autograd formula: it works under ``torch.compile`` and ``torch.export``. Internally it returns the outputs
    followed by what backward needs, so that saved tensors are ordinary results; callers see the outputs only.
Eager path
    The dispatcher and the custom op's Python cost several times what a small kernel takes. Plain tensors that nobody
    traces (no compiler, no torch mode, no function transform) go through a ``torch.autograd.Function`` to the very
    same host functions.

Policy
    Inputs and incoming gradients may have any strides; kernels see contiguous tensors, on a GPU at addresses that are
    multiples of 16 (a kernel is compiled anew for other addresses, and may then add in another order). The copy is
    made inside the operator, so what autograd keeps alive is the caller's tensor. Results never alias inputs or each
    other. Only needed gradients are computed, each in its input's dtype; a missing incoming gradient reaches the kernel
    as None.

Traits
    A candidate may say more about itself in ``TRAITS`` (a template: ``traits(spec)``), to save memory and traffic:
    ``shared_gradients`` {input: other input that has the very same gradient}, ``saved_outputs`` (outputs that
    backward reads, kept without a copy) and ``unread_inputs`` (inputs of which backward needs shape and dtype only).
    ``forward_needs``: forward takes a fourth argument, the names of the inputs whose gradients will be asked for.
    ``released``: saved tensors that backward may change and hand out as gradients; it then runs once.

Self-contained (torch only): bundles carry a copy of this file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NAMESPACE = "onboard"

Tensors = dict[str, Tensor | None]
ChooseConfig = Callable[[dict[str, int], torch.device], dict[str, Any]]

_PLAIN = (Tensor, torch.nn.Parameter)

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
        forward=lambda tensors, config, *needs: template.forward(tensors, spec, config, *needs),
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
        self.released: frozenset[str] = frozenset(traits.get("released", ()))
        self._forward_needs = bool(traits.get("forward_needs", False))
        self.name = _free_name(name)
        self._required = tuple(n for n, role in candidate.INPUTS.items() if "optional" not in role)
        self._required_places = tuple(self.inputs.index(n) for n in self._required)
        self._names = frozenset(self.inputs)
        self._wanted: dict[tuple[bool, ...], frozenset[str]] = {}
        self._differentiable = {n for n, role in candidate.INPUTS.items() if "differentiable" in role}
        self._again = tuple(self.outputs.index(n) for n in self.saved_outputs)
        self._saved_names: dict[Any, tuple[str, ...]] = {}
        self._register()

    def __call__(self, **tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Run the operator. Optional inputs may be None or missing.

        Raises:
            TypeError: an input is missing or unknown.
        """
        values = [tensors.get(n) for n in self.inputs]
        if not self._names.issuperset(tensors):
            self._refuse(tensors)
        for place in self._required_places:
            if values[place] is None:
                self._refuse(tensors)
        if torch.compiler.is_compiling() or _is_watched(values):
            return tuple(self._forward_op(*values)[: len(self.outputs)])
        if torch.is_grad_enabled():
            for t in values:
                if t is not None and t.requires_grad:
                    return _apply_eagerly(self, *values)
        return tuple(self._run(values, frozenset())[0][: len(self.outputs)])

    def _refuse(self, tensors: Tensors) -> NoReturn:
        unknown = [n for n in tensors if n not in self.inputs]
        missing = [n for n in self._required if tensors.get(n) is None]
        wrong = [f"no input {n!r}" for n in sorted(unknown)] + [f"{n!r} is missing" for n in missing]
        raise TypeError(f"{self.name}: {'; '.join(wrong)}")

    def config(self, **tensors: Tensor | None) -> dict[str, Any]:
        """The configuration that a call with these tensors uses."""
        return self._config(tensors)

    # ---- what both paths do -----------------------------------------------------------------------------------

    def _run(
        self, values: Sequence[Tensor | None], needs: frozenset[str] | None = None
    ) -> tuple[list[Tensor], tuple[str, ...], dict[str, Any]]:
        """Forward: the outputs followed by what backward needs beside them, its names, and the configuration.

        ``needs`` None means every gradient.
        """
        tensors = self._contiguous(values)
        config = self._config(tensors)
        if self._forward_needs and needs is not None:
            outputs, saved = self.candidate.forward(tensors, config, needs)
        else:
            outputs, saved = self.candidate.forward(tensors, config)
        names = self._extra(saved)
        return _without_aliases(self._results(outputs, saved), values), names, config

    def _differentiate(
        self,
        tensors: Tensors,
        saved: dict[str, Tensor],
        grads: Sequence[Tensor | None],
        wanted: frozenset[str],
        config: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Backward: the gradients of the inputs in ``wanted``, in the order of inputs, each in its input's dtype."""
        upstream = {n: None if g is None else _plain(g) for n, g in zip(self.outputs, grads, strict=True)}
        found = self.candidate.backward(tensors, saved, upstream, wanted, config)
        names = [n for n in self.inputs if n in wanted]
        results = []
        for n in names:
            like, gradient = tensors[n], found.get(n)
            assert like is not None
            if gradient is None:
                gradient = like.new_zeros(like.shape)
            results.append(gradient if gradient.dtype == like.dtype else gradient.to(like.dtype))
        kept = [t for n, t in saved.items() if n not in self.released] if self.released else saved.values()
        return dict(zip(names, _without_aliases(results, (*tensors.values(), *kept, *grads)), strict=True))

    def _keep(self, ctx: Any, inputs: Sequence[Tensor | None], output: Sequence[Tensor]) -> None:
        """Saves the inputs that backward reads, the outputs that it reads, and what forward kept for it."""
        # without this, autograd would fill the gradients of saved tensors with zeros
        ctx.set_materialize_grads(False)
        kept = inputs
        if self.unread:
            by_name = zip(self.inputs, inputs, strict=True)
            kept = [None if n in self.unread else t for n, t in by_name]
            ctx.unread = [
                None if t is None or n not in self.unread else (t.shape, t.dtype, t.device)
                for n, t in zip(self.inputs, inputs, strict=True)
            ]
        again = [output[place] for place in self._again]
        ctx.save_for_backward(*kept, *again, *output[len(self.outputs) :])

    def _kept(self, ctx: Any) -> tuple[list[Tensor | None], list[Tensor]]:
        """The inputs and the saved tensors of :meth:`_keep`; inputs that were not kept have only shape and dtype."""
        kept = ctx.saved_tensors
        inputs, saved = list(kept[: len(self.inputs)]), list(kept[len(self.inputs) :])
        if self.unread:
            for place, facts in enumerate(ctx.unread):
                if facts is not None:
                    shape, dtype, device = facts
                    # one element stands for all: backward only asks for the shape
                    inputs[place] = torch.empty((), dtype=dtype, device=device).expand(shape)
        return inputs, saved

    def _asked(self, needs: tuple[bool, ...]) -> frozenset[str]:
        """The inputs whose gradients autograd asks for, by ``needs`` of every input."""
        found = self._wanted.get(needs)
        if found is None:
            names = (n for n, need in zip(self.inputs, needs, strict=True) if need)
            found = self._wanted[needs] = frozenset(names) & self._differentiable
        return found

    def _served(self, asked: frozenset[str], inputs: Sequence[Tensor | None]) -> dict[str, str]:
        """Inputs whose gradient is that of another input, with the name of the other; usually none."""
        if not self.shared:
            return {}
        by_name = dict(zip(self.inputs, inputs, strict=True))
        sources = {n: self._gradient_source(n, by_name) for n in asked}
        return {n: other for n, other in sources.items() if n != other}

    def _gradient_source(self, name: str, tensors: Tensors) -> str:
        """The input whose gradient equals that of ``name``: itself, unless the candidate says they are one tensor."""
        other = self.shared.get(name)
        mine, theirs = tensors[name], tensors[other] if other else None
        if other is None or mine is None or theirs is None:
            return name
        return other if mine.dtype == theirs.dtype and mine.shape == theirs.shape else name

    def _spread(self, asked: frozenset[str], served: dict[str, str], found: dict[str, Tensor]) -> list[Tensor | None]:
        """One gradient or None for each input, from those that were computed."""
        return [found[served.get(n, n)] if n in asked else None for n in self.inputs]

    def _contiguous(self, values: Sequence[Tensor | None], as_they_are: frozenset[str] = frozenset()) -> Tensors:
        return {n: t if t is None or n in as_they_are else _plain(t) for n, t in zip(self.inputs, values, strict=True)}

    def _config(self, tensors: Tensors) -> dict[str, Any]:
        device = next(t.device for t in tensors.values() if t is not None)
        return self.choose_config(self.candidate.bucket(tensors), device)

    def _extra(self, saved: dict[str, Tensor]) -> tuple[str, ...]:
        """Names of the saved tensors that are not outputs."""
        if not self.saved_outputs:
            return tuple(saved)
        return tuple(n for n in saved if n not in self.saved_outputs)

    def _results(self, outputs: dict[str, Tensor], saved: dict[str, Tensor]) -> list[Tensor]:
        return [outputs[n] for n in self.outputs] + [saved[n] for n in self._extra(saved)]

    # ---- graph path -------------------------------------------------------------------------------------------

    def _register(self) -> None:
        arguments = ", ".join(f"Tensor{'?' * (n not in self._required)} {n}" for n in self.inputs)
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

    def _forward(self, *values: Tensor | None) -> list[Tensor]:
        results, names, _ = self._run(values)
        self._saved_names[_presence(values)] = names
        return results

    def _fake_forward(self, *values: Tensor | None) -> list[Tensor]:
        tensors = self._contiguous(values)
        return self._results(*self.candidate.outputs_like(tensors, self._config(tensors)))

    def _gradients(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        inputs, saved = self._kept(ctx)
        upstream = list(grads[: len(self.outputs)])
        asked = self._asked(tuple(ctx.needs_input_grad))
        if not asked or all(g is None for g in upstream):
            return (None,) * len(self.inputs)
        served = self._served(asked, inputs)
        computed = _computed(asked, served)
        results = self._backward_op(inputs, saved, upstream, [n in computed for n in self.inputs])
        found = dict(zip((n for n in self.inputs if n in computed), results, strict=True))
        return tuple(self._spread(asked, served, found))

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
        wanted = frozenset(n for n, need in zip(self.inputs, needs, strict=True) if need)
        # an operator of a graph changes none of its arguments
        own = {n: t.clone() if n in self.released else t for n, t in zip(names, saved, strict=True)}
        return list(self._differentiate(tensors, own, grads, wanted, config).values())

    def _fake_backward(
        self,
        inputs: Sequence[Tensor | None],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor]:
        return [t.new_empty(t.shape) for t, need in zip(inputs, needs, strict=True) if need and t is not None]

    def _names_of_saved(self, tensors: Tensors, config: dict[str, Any]) -> tuple[str, ...]:
        key = _presence(tuple(tensors.values()))
        if key not in self._saved_names:  # a compiled graph from another process may start with backward
            self._saved_names[key] = self._extra(self.candidate.outputs_like(tensors, config)[1])
        return self._saved_names[key]


class _Eager(torch.autograd.Function):
    """The eager path: :class:`Operator`'s host functions called straight from autograd."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *values: Tensor | None) -> tuple[Tensor, ...]:
        results, names, config = operator._run(values, operator._asked(ctx.needs_input_grad[1:]))
        operator._keep(ctx, values, results)
        ctx.spent = False
        ctx.operator, ctx.config, ctx.names = operator, config, operator.saved_outputs + names
        return tuple(results[: len(operator.outputs)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # autograd leaves grad mode on only where it wants second derivatives
        return _eager_gradients_once(ctx, *grads) if torch.is_grad_enabled() else _eager_gradients(ctx, *grads)


# what Function.apply does more serves function transforms, which never come here
_apply_eagerly: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Eager).apply


def _eager_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of :class:`_Eager`'s inputs; the first of them is the operator."""
    operator: Operator = ctx.operator
    inputs, saved = operator._kept(ctx)
    asked = operator._asked(ctx.needs_input_grad[1:])
    if not asked or all(g is None for g in grads):
        return (None,) * (1 + len(inputs))
    if operator.released:
        if ctx.spent:
            raise RuntimeError(f"{operator.name}: backward ran before and gave its saved gradients away")
        ctx.spent = True
    served = operator._served(asked, inputs)
    tensors = operator._contiguous(inputs, as_they_are=operator.unread)
    kept = dict(zip(ctx.names, saved, strict=True))
    found = operator._differentiate(tensors, kept, grads, _computed(asked, served), ctx.config)
    return None, *operator._spread(asked, served, found)


_eager_gradients_once = once_differentiable(_eager_gradients)


def _computed(asked: frozenset[str], served: dict[str, str]) -> frozenset[str]:
    """The inputs whose gradients the candidate makes."""
    return asked.difference(served).union(served.values()) if served else asked


def _plain(t: Tensor) -> Tensor:
    """The tensor as kernels see it: contiguous, and on a GPU aligned to 16 bytes."""
    t = t.contiguous()
    # a fake tensor has no address
    return t.clone() if t.is_cuda and t.__class__ in _PLAIN and t.data_ptr() % 16 else t


def _is_watched(values: Sequence[Tensor | None]) -> bool:
    """Whether somebody must see one operator call: a fake or meta tensor, a subclass, a torch mode, a transform."""
    for t in values:
        if t is not None and (t.__class__ not in _PLAIN or t.is_meta):
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _presence(values: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Which inputs are there: what a candidate saves depends on nothing else."""
    return tuple(t is not None for t in values)


def _without_aliases(results: list[Tensor], known: Sequence[Tensor | None]) -> list[Tensor]:
    """Copies of those results that share memory with a known tensor or an earlier result."""
    seen = [t.untyped_storage().data_ptr() for t in known if t is not None]
    fresh = []
    for result in results:
        address = result.untyped_storage().data_ptr()  # 0: nothing in it to share
        fresh.append(result.clone() if address and address in seen else result)
        seen.append(address)
    return fresh


def _free_name(name: str) -> str:
    plain = re.sub(r"\W", "_", name)
    for candidate in (plain, *(f"{plain}_{i}" for i in itertools.islice(itertools.count(2), 100_000))):
        if candidate not in _taken:
            _taken.add(candidate)
            return candidate
    raise ValueError(f"too many operators named {name}")
