"""Records what a candidate's host functions would launch, and compiles it: no GPU, no memory, no values.

The host functions run under ``FakeTensorMode`` at real sizes with every launch recorded instead of made. A
:class:`Recipe` is a recorded launch as plain data: equal recipes give equal machine code, and it can cross to another
process, which compiles it into Triton's cache, where the first real launch finds it.

Self-contained (torch and triton only): bundles carry a copy of this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TensorShapes = dict[str, tuple[tuple[int, ...], str] | None]
"""Shape and dtype by name, e.g. ``{"x": ((4096, 2304), "bfloat16"), "cu_seqlens": None}``."""


@dataclass
class Launch:
    """A recorded ``kernel[grid](*args, **kwargs)``."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches of compiled-mode kernels instead of making them."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    stock = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, grid, args, kwargs))

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = stock


def record_launches(
    module: Any,
    tensors: TensorShapes,
    config: dict[str, Any],
    alone: bool = False,
    frozen: Collection[str] = (),
) -> dict[str, list[Launch]]:
    """The launches of one forward and one backward with every gradient, by phase.

    Args:
        module: the candidate.
        tensors: shapes of its inputs.
        config: tile sizes.
        alone: and ``"x alone"``, those of a forward and a backward for the gradient of x only, for every x.
        frozen: inputs whose gradients nobody asks for.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    by_need = (getattr(module, "TRAITS", None) or {}).get("forward_needs", False)
    with FakeTensorMode(), recorded() as launches:
        given = {
            name: None if entry is None else torch.empty(entry[0], dtype=getattr(torch, entry[1]))
            for name, entry in tensors.items()
        }

        def both(needs: frozenset[str]) -> int:
            outputs, saved = module.forward(dict(given), config, *[needs] * by_need)
            split = len(launches)
            module.backward(dict(given), saved, {n: torch.empty_like(t) for n, t in outputs.items()}, needs, config)
            return split

        there = [n for n, role in module.INPUTS.items() if "differentiable" in role and given.get(n) is not None]
        needs = [n for n in there if n not in frozen]
        split = both(frozenset(needs))
        phases = {"forward": launches[:split], "backward": launches[split:]}
        for name in needs if alone else ():
            launches.clear()
            both(frozenset([name]))
            phases[f"{name} alone"] = launches[:]
    return phases


def compile_launch(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel for a recorded launch, for ``sm_<arch>``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    def mock(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(mock, value))
        return MockTensor(value.dtype, list(value.shape)) if isinstance(value, torch.Tensor) else value

    kernel = launch.kernel
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    args = tuple(map(mock, launch.args))
    kwargs = {k: mock(v) for k, v in launch.kwargs.items()} | {"debug": False, "instrumentation_mode": ""}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__)


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor in a recipe: the machine code depends on its dtype alone."""

    dtype: str


@dataclass(frozen=True)
class Recipe:
    """One launch to compile."""

    kernel: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


def recipe(launch: Launch) -> Recipe:
    """The launch without its tensors and its grid."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return Pointer(str(value.dtype).removeprefix("torch.")) if isinstance(value, Tensor) else value

    kwargs = tuple(sorted((name, plain(value)) for name, value in launch.kwargs.items()))
    return Recipe(launch.kernel.fn.__name__, tuple(map(plain, launch.args)), kwargs)


def compile_recipe(module: Any, made: Recipe, arch: int) -> Any:
    """Triton's compiled kernel for a recipe of one of the module's kernels, for ``sm_<arch>``."""

    def tensor(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tensor, value))
        return torch.empty(1, dtype=getattr(torch, value.dtype)) if isinstance(value, Pointer) else value

    kwargs = {name: tensor(value) for name, value in made.kwargs}
    launch = Launch(getattr(module, made.kernel), (1,), tuple(map(tensor, made.args)), kwargs)
    return compile_launch(launch, arch)
