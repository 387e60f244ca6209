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

from kernel_templates.loading import load_module
from kernel_templates.recording import Recipe, TensorShapes, compile_recipe, recipe, record_launches

MOST_PROCESSES = 32

Config = dict[str, Any]


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
        for made in recipes:
            needed.setdefault(made, []).append(number)
    # one at a time: compilation times differ by a factor of ten
    for made, shared, error in pool.imap_unordered(partial(_compile, source, arch), needed):
        for number in needed[made]:
            found[number].shared_bytes = max(found[number].shared_bytes, shared)
            found[number].errors += [f"{made.kernel}: {error}"] if error else []
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
        return [recipe(launch) for launches in phases.values() for launch in launches], ""
    except Exception as problem:
        return [], f"{type(problem).__name__}: {problem}"[:500]


def _compile(source: Path, arch: int, made: Recipe) -> tuple[Recipe, int, str]:
    try:
        return made, int(compile_recipe(_module(source), made, arch).metadata.shared), ""
    except Exception as problem:
        return made, 0, f"{type(problem).__name__}: {problem}"[:500]
