"""Remembered launches: the same kernel with the same arguments, and Triton's own way for everything else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_templates import launch
from kernel_templates.launch import Launcher


class Run:
    """Stands for Triton's Python around the C function that launches."""

    launch_cooperative_grid, launch_pdl = False, True
    profile_scratch_size = 0

    def __init__(self, scratch: int) -> None:
        self.global_scratch_size = scratch
        self.through_python: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, *everything: Any) -> None:
        self.through_python.append(everything)

    def launch(self, *everything: Any) -> None:
        self.launches.append(everything)


class Compiled:
    """Stands for a compiled kernel: notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, scratch: int = 0) -> None:
        self.run = Run(scratch)


class Kernel:
    """Stands for a kernel: compiles once for every kind of arguments, as Triton does."""

    arg_names = ("x_ptr", "out_ptr", "N", "EPS", "BLOCK")

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.compiled: dict[Any, Compiled] = {}
        self.stock_launches = 0
        self.scratch = 0

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        self.stock_launches += 1
        facts = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else str(a) for a in args]
        return self.compiled.setdefault((*facts, str(kwargs)), Compiled(self.scratch))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # the index of a CPU tensor's device
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Kernel()


def call(run: Launcher, x: torch.Tensor, n: int = 5, grid: Any = (3, 2), **changed: Any) -> Any:
    return run(x, x, n, 0.5, grid=grid, warmup=False, **({"BLOCK": 64, "num_warps": 4} | changed))


def test_a_second_equal_launch_goes_straight_to_the_compiled_kernel(kernel: Kernel) -> None:
    run, x = Launcher(kernel), torch.zeros(8)
    compiled = call(run, x)
    assert call(run, x) is compiled
    assert kernel.stock_launches == 1
    # the C function's order: grid, stream, kernel, flags, no scratch memory, metadata, no metadata and hooks of the
    # launch, then every argument as the kernel names it, tensors by their addresses
    (launched,) = compiled.run.launches
    assert launched[:13] == (3, 2, 1, 7, "function", False, True, None, None, "metadata", None, None, None)
    assert launched[13:] == (x.data_ptr(), x.data_ptr(), 5, 0.5, 64)


def test_a_kernel_that_needs_scratch_memory_is_launched_by_triton_s_python(kernel: Kernel) -> None:
    kernel.scratch = 128
    run, x = Launcher(kernel), torch.zeros(8)
    compiled = call(run, x)
    call(run, x, grid=(3,))
    assert compiled.run.launches == []
    (launched,) = compiled.run.through_python
    assert launched[:9] == (3, 1, 1, 7, "function", "metadata", None, None, None)
    assert launched[9:] == (x.data_ptr(), x.data_ptr(), 5, 0.5, 64)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(8, dtype=torch.bfloat16)},
        {"x": torch.zeros(9)[1:]},
        {"n": 16},
        {"n": True},
        {"BLOCK": 128},
        {"BLOCK": 64.0},
        {"num_warps": 8},
    ],
    ids=["dtype", "alignment", "number", "flag", "constant", "constant of another kind", "option"],
)
def test_what_changes_the_machine_code_is_compiled_by_triton(kernel: Kernel, other: dict[str, Any]) -> None:
    run, x = Launcher(kernel), torch.zeros(8)
    call(run, x, n=1)
    first = call(run, x, n=1)
    second = call(run, **({"x": x, "n": 1} | other))
    assert kernel.stock_launches == 2
    assert len(first.run.launches) == 1
    if "n" not in other or other["n"] is not True:
        assert second is not first


def test_a_value_of_another_tensor_is_passed_on(kernel: Kernel) -> None:
    run, x, y = Launcher(kernel), torch.zeros(8), torch.ones(8)
    call(run, x)
    compiled = call(run, y)
    assert kernel.stock_launches == 1
    assert compiled.run.launches[0][13] == y.data_ptr()


@pytest.mark.parametrize("why", ["grid", "hook", "profiler", "default", "warmup", "tuple", "tensor by name", "device"])
def test_what_it_does_not_know_goes_through_triton(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    run, x = Launcher(kernel), torch.zeros(8)
    given: dict[str, Any] = {"grid": (1,), "warmup": False, "BLOCK": 64}
    if why == "grid":
        given["grid"] = lambda meta: (1,)
    if why == "hook":
        kernel.pre_run_hooks.append(print)
    if why == "profiler":
        monkeypatch.setattr("triton.knobs.runtime.launch_enter_hook.calls", [print])
    if why == "default":
        del given["BLOCK"]  # Triton knows the default, the launcher does not
    if why == "warmup":
        given["warmup"] = True
    if why == "tensor by name":
        given["other"] = x
    if why == "device":
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    first: Any = (x, x) if why == "tuple" else x
    for _ in range(3):
        run(first, x, 5, 0.5, **given)
    assert not run.seen  # what is not in a key is not kept alive by one
    assert kernel.stock_launches == 3


def test_sizes_that_never_repeat_do_not_pile_up(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REMEMBERED", 10)
    run, x = Launcher(kernel), torch.zeros(8)
    for n in range(100):
        call(run, x, n=n)
        assert len(run.seen) <= 10
    call(run, x, n=99)
    assert kernel.stock_launches == 100


def test_another_triton_keeps_its_own_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    def body(x_ptr: Any) -> None: ...

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    module = SimpleNamespace(kernel=JITFunction(body), other=3)
    monkeypatch.setattr("triton.__version__", "99.0")
    launch.quicken(module)
    assert not isinstance(module.kernel.run, Launcher)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    launch.quicken(module)
    launch.quicken(module)
    assert isinstance(module.kernel.run, Launcher)
    assert not isinstance(module.kernel.run.stock, Launcher)
