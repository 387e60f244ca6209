"""Put a bundle's kernels into a transformers model, and take them out again.

    from apply import apply          # with the bundle's folder on sys.path, or loaded by path
    applied = apply(model)
    ...
    applied.remove()

The bundle is verified before anything else of it is imported. Only this model's instances are patched: another model
of the same class in the same process keeps its own code. Parameters, their names and the state dict stay as they
are; a call that a kernel does not cover (another dtype, an unknown argument) runs the model's own code.

Needs torch, triton and transformers; nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from hashlib import sha256
from math import log2
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent


class KernelRefused(RuntimeError):
    """A kernel may not run here: it was not proven on this kind of device."""


@dataclass
class Applied:
    """What was put into the model."""

    swapped: dict[str, list[str]] = field(default_factory=dict)
    """Operator spec digest -> names of the modules that now use its kernel."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name -> why a kernel that names its class was not put there."""
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    """Digest -> module name -> calls that ran on the kernel so far."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Module name -> why its last uncovered call ran the model's own code."""
    compiled: dict[str, Any] = field(default_factory=dict)
    """What was compiled ahead: ``compiled`` kernels, ``failed`` ones, ``seconds``."""
    indexers: Any = None
    """What is asked of the indexers of sparse attention (``indexer_training.py``); None: they do not learn."""
    _root: Path = HERE
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def train_indexers(self, stage: str | None, coefficient: float = 1.0) -> Any:
        """Let the indexers of sparse attention learn from now on, or (None) no longer.

        Args:
            stage: ``dense``, the warm-up with every key (freeze the rest of the model), or ``sparse``.
            coefficient: of the loss, which is added where the attention ends, to backward only.

        Returns:
            What holds each attention's last loss in ``losses``; None for None.

        Raises:
            ValueError: an unknown stage.
        """
        kind = _sibling(self._root, "indexer_training").IndexerTraining
        self.indexers = None if stage is None else kind(stage, coefficient)
        return self.indexers

    words: dict[str, str] = field(default_factory=dict)
    """Digest -> the operator in words."""

    def __str__(self) -> str:
        """A line a kernel with its modules, and a line a module that kept its own code."""
        lines = [
            f"{self.words.get(d, d)}: {', '.join(n or 'the model' for n in names)}" for d, names in self.swapped.items()
        ]
        return "\n".join([*lines, *(f"own code in {name or 'the model'}: {why}" for name, why in self.skipped.items())])

    def ran(self) -> dict[str, int]:
        """Digest -> module instances that have run on its kernel so far."""
        return {digest: len(self.calls.get(digest, {})) for digest in self.swapped}

    def remove(self) -> None:
        """Put the model's own code back. May be called more than once."""
        while self._undo:
            self._undo.pop()()

    def count(self, digest: str, module: str) -> None:
        """Note one call that ran on a kernel."""
        by_module = self.calls.setdefault(digest, {})
        by_module[module] = by_module.get(module, 0) + 1


def apply(
    model: nn.Module,
    *,
    bundle: Path | str = HERE,
    verify: bool = True,
    trusted_key: str | None = None,
    allow_interpreter: bool | None = None,
    allow_unproven: bool = False,
    only: Collection[str] | None = None,
    tokens: int | None = None,
) -> Applied:
    """Patch ``model`` with the bundle's kernels.

    Args:
        model: a transformers model on one kind of device.
        bundle: the bundle's folder; by default the one that this file lies in.
        verify: check every file against the signed manifest first.
        trusted_key: public key (hex) that must have signed the bundle; None accepts the user's trusted keys.
        allow_interpreter: whether CPU tensors may run through Triton's interpreter, which is exact and slow; None
            allows it on a machine without a GPU.
        allow_unproven: run on a GPU kernels whose verdict does not cover this GPU and Triton version.
        only: digests to use; None means all.
        tokens: of a training step (batch times length): its kernels are compiled now, side by side, rather than one
            after another in the first step. Without a GPU there is nothing to compile.

    Raises:
        BundleError: the bundle is not what was signed, or nobody that is trusted here signed it.
        KernelRefused: the kernels' verdicts do not cover this device.
    """
    root = Path(bundle).resolve()
    if verify:
        _sibling(root, "verify").verify_trusted(root, trusted_key)
    entries = [
        e for e in json.loads((root / "bundle.json").read_text())["kernels"] if only is None or e["digest"] in only
    ]
    device = next(model.parameters()).device
    for entry in entries:
        _permit(entry, device, allow_interpreter, allow_unproven)
    hooks, checks = _sibling(root, "hooks"), _sibling(root, "checks")
    ahead = None
    if tokens and device.type == "cuda":
        ahead = _sibling(root, "ahead").start(root, tokens, [entry["digest"] for entry in entries], device)
    applied = Applied(_root=root)
    try:
        for name, module in list(model.named_modules()):
            for candidates in _slots(entries, module):
                _swap(root, hooks, checks, applied, name, module, candidates)
    except BaseException:
        applied.remove()
        raise
    finally:
        if ahead is not None:
            applied.compiled = ahead.wait()
    return applied


def load_op(
    digest: str,
    *,
    bundle: Path | str = HERE,
    verify: bool = True,
    trusted_key: str | None = None,
    allow_unproven: bool = False,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """One operator of the bundle, by the digest of its spec: ``op(**tensors)`` gives the tuple of its outputs.

    Raises:
        KeyError: the bundle has no such operator.
        BundleError: the bundle is not what was signed, or nobody that is trusted here signed it.
        KernelRefused: there is a GPU, and the verdict does not cover it.
    """
    root = Path(bundle).resolve()
    if verify:
        _sibling(root, "verify").verify_trusted(root, trusted_key)
    entries = {e["digest"]: e for e in json.loads((root / "bundle.json").read_text())["kernels"]}
    if digest not in entries:
        raise KeyError(f"no operator {digest}; the bundle has {', '.join(sorted(entries))}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _permit(entries[digest], device, None, allow_unproven)
    op: Callable[..., tuple[torch.Tensor, ...]] = _load_kernel(root, entries[digest]).op
    return op


def _slots(entries: list[dict[str, Any]], module: nn.Module) -> list[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Kernels that name the module's class, by the slot that they compete for: its forward, or a function it calls."""
    slots: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for entry in entries:
        for binding in entry["bindings"]:
            if _is(module, binding):
                slots.setdefault(binding.get("function") or "", []).append((entry, binding))
    return list(slots.values())


OWN_FILES = {
    "linear_cross_entropy": "loss",
    "routing": "routing",
    "sparse_attention": "sparse_attention",
    "indexer": "indexer",
    "novel": "novel",
}
"""Hooks that stand in a file of their own, with ``install`` and ``mismatch``."""


def _swap(
    root: Path,
    hooks: Any,
    checks: Any,
    applied: Applied,
    name: str,
    module: nn.Module,
    candidates: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    """Give one slot of a module the kernel that fits it best, or note why none does."""
    reasons = []
    for entry, binding in sorted(candidates, key=lambda pair: _distance(checks, name, module, *pair)):
        own = _sibling(root, OWN_FILES[binding["hook"]]) if binding["hook"] in OWN_FILES else None
        names = checks.attributes(binding)
        if own is None:
            reason = checks.mismatch(binding, entry["spec"], module)
        else:
            reason = own.mismatch(entry["spec"], module, names)
        if reason is None:
            op = _load_kernel(root, entry).op
            if own is None:
                applied._undo.append(hooks.install(binding, entry, names, module, name, op, applied))
            else:
                swap = hooks.Swap(entry, binding, names, name, op, applied)
                applied._undo.append(own.install(hooks, module, swap))
            applied.swapped.setdefault(entry["digest"], []).append(name)
            applied.words[entry["digest"]] = entry.get("words", entry["digest"])
            return
        reasons.append(f"{entry['digest']}: {reason}")
    applied.skipped[name] = "; ".join([*filter(None, [applied.skipped.get(name)]), *reasons])


OWN_CODE = "onboard_definition."
"""Before the modules of a model's own code, which everyone imports under another package."""


def _is(module: nn.Module, binding: dict[str, Any]) -> bool:
    """Whether the module is of the binding's class; wrappers that subclass it on the fly count."""
    place, _, name = binding["target"].partition(":")
    own = place.removeprefix(OWN_CODE) if place.startswith(OWN_CODE) else ""
    for cls in type(module).__mro__:
        if cls.__qualname__ == name:
            same = cls.__module__ == place
            if same or (own and f".{cls.__module__}".endswith(f".{own}")):
                return True
    return False


def _distance(
    checks: Any, name: str, module: nn.Module, entry: dict[str, Any], binding: dict[str, Any]
) -> tuple[bool, float]:
    """Order of preference: a place that the binding names (whatever its layer number), then the nearest sizes.

    So one bundle fits the published model and its reduced twin.
    """
    places = {_place(path) for path in binding["module_paths"]}
    sizes = checks.sizes(binding, module)
    apart = sum(abs(log2(max(size, 1) / max(entry["spec"].get(dim, size), 1))) for dim, size in sizes.items())
    return bool(places) and _place(name) not in places, apart


def _place(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


# ---- what may run here ----------------------------------------------------------------------------------------


def _permit(entry: dict[str, Any], device: torch.device, allow_interpreter: bool | None, allow_unproven: bool) -> None:
    if device.type != "cuda":
        if allow_interpreter is False:
            raise KernelRefused(f"{entry['name']}: the model is on {device.type}, and the interpreter is not allowed")
        if torch.cuda.is_available() and not allow_interpreter:
            raise KernelRefused(
                f"{entry['name']}: the model is on {device.type} and this process has a GPU; move the model there, or "
                "hide the GPU (CUDA_VISIBLE_DEVICES=) and pass allow_interpreter=True"
            )
        return
    import triton

    here = _words(torch.cuda.get_device_name(device))
    for verdict in entry["verified"]:
        same = _words(verdict["device"]) == here and verdict["triton"] == triton.__version__
        if verdict["level"] == "compiled" and same:
            return
    if not allow_unproven:
        proven = ", ".join(f"{v['level']} on {v['device']} with Triton {v['triton']}" for v in entry["verified"])
        raise KernelRefused(
            f"{entry['name']} is proven {proven or 'nowhere'}, not compiled on {torch.cuda.get_device_name(device)} "
            f"with Triton {triton.__version__}: judge it here first, or pass allow_unproven=True"
        )


def _words(device: str) -> str:
    return "_".join(re.split(r"[\s_-]+", device.lower()))


# ---- loading ----------------------------------------------------------------------------------------------------


def _load_kernel(root: Path, entry: dict[str, Any]) -> ModuleType:
    """The kernel's package; loaded once a process and content."""
    folder = root / entry["path"]
    name = "_" + entry["name"].replace("-", "_") + "_" + sha256(str(folder).encode()).hexdigest()[:8]
    return _load(name, folder / "__init__.py", package=True)


def _sibling(root: Path, name: str) -> ModuleType:
    """A helper of the bundle, loaded by path so that no other module of the same name is taken for it."""
    folder = root if (root / f"{name}.py").is_file() else HERE
    return _load(f"_onboard_{name}_{sha256(str(folder).encode()).hexdigest()[:8]}", folder / f"{name}.py")


def _load(name: str, path: Path, package: bool = False) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    folders = [str(path.parent)] if package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: Triton and dataclasses look modules up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
