"""Compiles many configurations of one candidate side by side, in processes that never touch the GPU.

A configuration's host functions run under fake tensors with their launches recorded; launches that several
configurations share are compiled once. The machine code lands in Triton's cache, where the first real launch finds it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.pool import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_templates.aot import Launch, TensorShapes, compile_launch, record_launches
from kernel_templates.loading import load_module

MOST_PROCESSES = 32

Config = dict[str, Any]


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor in a recorded launch: the machine code depends on its dtype alone."""

    dtype: str


@dataclass(frozen=True)
class Recipe:
    """One launch to compile; equal recipes give equal machine code."""

    kernel: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass
class Compiled:
    """What became of one configuration."""

    shared_bytes: int = 0
    """Most shared memory that one of its kernels takes."""
    errors: list[str] = field(default_factory=list)
    """Kernels that do not compile, and why."""


def start_pool() -> Pool:
    """Processes that compile; to be forked before this process touches the GPU."""
    return multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, MOST_PROCESSES))


def compile_configs(
    pool: Pool, source: Path, shapes: TensorShapes, configs: Sequence[Config], arch: int
) -> list[Compiled]:
    """Compile every kernel of every configuration; what fails is noted, never raised.

    Args:
        pool: of :func:`start_pool`.
        source: the candidate's file.
        shapes: of its inputs.
        configs: configurations.
        arch: compute capability, e.g. 90.
    """
    found = [Compiled() for _ in configs]
    needed: dict[Recipe, list[int]] = {}
    for number, (recipes, error) in enumerate(pool.map(partial(_recipes, source, shapes), configs)):
        found[number].errors += [error] if error else []
        for recipe in recipes:
            needed.setdefault(recipe, []).append(number)
    # one at a time: compilation times differ by a factor of ten
    for recipe, shared, error in pool.imap_unordered(partial(_compile, source, arch), needed):
        for number in needed[recipe]:
            found[number].shared_bytes = max(found[number].shared_bytes, shared)
            found[number].errors += [f"{recipe.kernel}: {error}"] if error else []
    return found


def shapes_of(tensors: dict[str, Tensor | None]) -> TensorShapes:
    """Shape and dtype of every input."""
    return {n: None if t is None else (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}


@cache
def _module(source: Path) -> ModuleType:
    return load_module(source)


def _recipes(source: Path, shapes: TensorShapes, config: Config) -> tuple[list[Recipe], str]:
    torch.set_num_threads(1)
    try:
        phases = record_launches(_module(source), shapes, config)
        return [_recipe(launch) for launches in phases.values() for launch in launches], ""
    except Exception as problem:
        return [], f"{type(problem).__name__}: {problem}"[:500]


def _recipe(launch: Launch) -> Recipe:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return Pointer(str(value.dtype).removeprefix("torch.")) if isinstance(value, Tensor) else value

    kwargs = tuple(sorted((name, plain(value)) for name, value in launch.kwargs.items()))
    return Recipe(launch.kernel.fn.__name__, tuple(map(plain, launch.args)), kwargs)


def _compile(source: Path, arch: int, recipe: Recipe) -> tuple[Recipe, int, str]:
    def tensor(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tensor, value))
        return torch.empty(1, dtype=getattr(torch, value.dtype)) if isinstance(value, Pointer) else value

    try:
        kernel = getattr(_module(source), recipe.kernel)
        launch = Launch(kernel, (1,), tuple(map(tensor, recipe.args)), {n: tensor(v) for n, v in recipe.kwargs})
        return recipe, int(compile_launch(launch, arch).metadata.shared), ""
    except Exception as problem:
        return recipe, 0, f"{type(problem).__name__}: {problem}"[:500]
