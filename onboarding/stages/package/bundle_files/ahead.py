"""Compile a bundle's kernels before the first step: side by side, in processes that never touch the GPU.

    python ahead.py --tokens 8192            fills Triton's cache, without a GPU too (while an image is built)
    apply(model, tokens=8192)                the same for the GPU at hand, before it returns

The host functions run under fake tensors of a training step's shapes with their launches recorded; each launch is
compiled once. What a step launches beside that (another layout, another length) is compiled when it comes, as always.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
MOST_PROCESSES = 32


class Ahead:
    """Compilation that goes on in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def wait(self) -> dict[str, Any]:
        """Its report: ``compiled`` kernels, ``failed`` ones with the reason, ``seconds``. Never raises for a failure:
        a kernel that is not compiled ahead is compiled when it is launched first."""
        said, complaint = self.process.communicate()
        try:
            report: dict[str, Any] = json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):
            return {"compiled": 0, "failed": {"": complaint[-500:]}, "seconds": 0.0}
        return report


def start(root: Path, tokens: int, digests: Collection[str], device: Any) -> Ahead:
    """Start compiling what a step of ``tokens`` tokens launches of these kernels on a CUDA device."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    name = "_".join(torch.cuda.get_device_name(device).lower().replace("-", " ").split())
    command = [sys.executable, str(HERE / "ahead.py"), "--bundle", str(root), "--tokens", str(tokens)]
    command += ["--arch", str(10 * major + minor), "--device", name, *(f"--only={digest}" for digest in digests)]
    command.append("--no-verify")  # who starts this has verified the bundle, or chose not to
    # no GPU for it: forked processes may not share one
    quiet = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return Ahead(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=quiet))


def compile_ahead(
    root: Path, tokens: int, *, arch: int, device: str, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Compile in forked processes, one a core at most; returns the report of :meth:`Ahead.wait`."""
    began = time.monotonic()
    entries = [
        entry
        for entry in json.loads((root / "bundle.json").read_text())["kernels"]
        if entry.get("shapes") and (only is None or entry["digest"] in only)
    ]
    _module(HERE / "recording.py")  # before the fork: recipes cross to other processes
    failed: dict[str, str] = {}
    compiled = 0
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, MOST_PROCESSES)) as pool:
        wanted: dict[tuple[str, Any], None] = {}
        for entry, recipes in zip(entries, pool.imap(partial(_recipes, root, tokens, device), entries), strict=True):
            if isinstance(recipes, str):
                failed[entry["name"]] = recipes
            else:
                wanted |= dict.fromkeys((entry["path"], made) for made in recipes)
        for name, problem in pool.imap_unordered(partial(_compile, root, arch), wanted):
            if problem:
                failed[name] = problem
            compiled += not problem
    return {"compiled": compiled, "failed": failed, "seconds": round(time.monotonic() - began, 2)}


def _recipes(root: Path, tokens: int, device: str, entry: dict[str, Any]) -> Any:
    """Every launch of a step with all weights trained, and of one with frozen weights; a text is why there is none."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    folder = root / entry["path"]
    recording, configs = _module(HERE / "recording.py"), _module(folder / "_configs.py")
    shapes = {
        name: None if t is None else (tuple(round(a * tokens + b) for a, b in t["dims"]), t["dtype"])
        for name, t in entry["shapes"].items()
    }
    # what does not grow with the tokens is a weight
    weights = [name for name, t in entry["shapes"].items() if t and not any(a for a, _ in t["dims"])]
    try:
        kernel = _module(folder / "_kernel.py")
        with FakeTensorMode():
            made = {n: None if s is None else torch.empty(s[0], dtype=getattr(torch, s[1])) for n, s in shapes.items()}
            bucket = kernel.bucket(made)
        config = configs.choose(configs.load(folder / "configs"), device, bucket).config
        found: dict[Any, None] = {}
        for frozen in ([], weights) if weights else ([],):
            phases = recording.record_launches(kernel, shapes, config, frozen=frozen)
            found |= {recording.recipe(launch): None for launches in phases.values() for launch in launches}
        return list(found)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:500]


def _compile(root: Path, arch: int, wanted: tuple[str, Any]) -> tuple[str, str]:
    path, made = wanted
    try:
        _module(HERE / "recording.py").compile_recipe(_module(root / path / "_kernel.py"), made, arch)
        return made.kernel, ""
    except Exception as problem:
        return f"{path}: {made.kernel}", f"{type(problem).__name__}: {problem}"[:500]


@cache
def _module(path: Path) -> ModuleType:
    """A file of the bundle, loaded by itself: the kernel's package would give its kernels a launcher of their own."""
    name = "_ahead_" + "_".join(path.parts[-4:]).replace(".", "_").replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # recipes cross to another process by the name of their class
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Exit status 1 when a kernel does not compile."""
    parser = argparse.ArgumentParser(description="Compile this bundle's kernels into Triton's cache.")
    parser.add_argument("--bundle", type=Path, default=HERE)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of a step (batch times length)")
    parser.add_argument("--arch", type=int, default=90, help="compute capability; 90 is Hopper")
    parser.add_argument("--device", default="nvidia_h200", help="whose configurations to take")
    parser.add_argument("--only", action="append", help="digests of operators; all by default")
    parser.add_argument("--no-verify", action="store_true", help="don't check the bundle's signature first")
    options = parser.parse_args()
    root = options.bundle.resolve()
    if not options.no_verify:
        _module(HERE / "verify.py").verify_trusted(root, None)
    report = compile_ahead(root, options.tokens, arch=options.arch, device=options.device, only=options.only)
    print(json.dumps(report))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
