"""The candidate's process: confined, single use, started before the candidate is known.

Imports torch and Triton, says ``ready``, then serves requests (JSON lines on an inherited pipe) until the pipe
closes. It holds no expected value, no seed and no reference; what it reports is checked by the judge from raw bytes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
import triton
import triton.language
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernel_templates import interpreter
from kernel_templates.bind import Operator, bind
from kernel_templates.configs import Chooser
from kernel_templates.launch import Launcher, quicken
from kernel_templates.loading import load_module
from onboarding.stages.judge import bounds, fresh
from onboarding.stages.judge.images import DTYPES, Image, load, save
from onboarding.stages.judge.surroundings import changed, surroundings


class Buffers:
    """The tensors of one call in memory of their own."""

    def __init__(self, device: torch.device, described: dict[str, Any]) -> None:
        self.storages: dict[str, Tensor] = {}
        self.views: dict[str, Tensor | None] = {}
        for name, data in described.items():
            if data is None:
                self.views[name] = None
                continue
            self.storages[name] = _read(data).to(device)
            view = _image(data).view(self.storages[name]).detach()
            self.views[name] = view.requires_grad_(data.get("requires_grad", False))

    def leaves(self, needs: list[str] | None) -> dict[str, Tensor | None]:
        """The tensors, and which of them require a gradient: as described, or those named in ``needs``."""
        if needs is None:
            return self.views
        return {n: None if t is None else t.detach().requires_grad_(n in needs) for n, t in self.views.items()}

    def overwrite(self, described: dict[str, Any]) -> None:
        """Other values at the same addresses in the same tensors, without a trace in their version counters."""
        for name, storage in self.storages.items():
            storage.data.copy_(_read(described[name]))


def _image(data: dict[str, Any]) -> Image:
    return Image.from_json(data, largest=data["elements"])


def _read(data: dict[str, Any]) -> Tensor:
    return load(Path(data["file"]), DTYPES[data["dtype"]], data["elements"])


class _Configs:
    """Chooses configurations, and knows whether somebody writes into them: they outlive a call."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.given: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __call__(self, bucket: dict[str, int], device: torch.device) -> dict[str, Any]:
        config = self.chooser(bucket, device)
        if not any(known is config for known, _ in self.given):
            self.given.append((config, copy.deepcopy(config)))
        return config

    def changed(self) -> list[str]:
        """In words, empty if all are as they were."""
        return ["its configuration"] * any(config != as_given for config, as_given in self.given)


class Session:
    """Serves the judge's requests for one candidate."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: ModuleType | None = None
        self.operator: Operator | None = None
        self.configs = _Configs(Chooser({}))

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        kind = request["kind"]
        if kind == "load":
            interpreted = self.device.type == "cpu"
            if interpreted:
                interpreter.activate(strict=True)
                bounds.watch()
            self.module = load_module(Path(request["candidate"]))
            quicken(self.module)  # as it will run in a bundle
            self.configs = _Configs(Chooser.from_folder(Path(request["configs"])))
            self.operator = bind(self.module, name="candidate", choose_config=self.configs)
            return {"inputs": list(self.operator.inputs), "outputs": list(self.operator.outputs)}
        if kind == "case":
            interleaved = bool(request.get("interleaved"))
            before = surroundings(self.device)
            if any(call.get("mode") == "compile" for call in request["calls"]):
                del before["Python's threads"]  # the compiler starts its own
            calls = self._case(request["calls"], Path(request["out"]), interleaved)
            found = changed(before, surroundings(self.device)) + self.configs.changed()
            return {"calls": calls, "changed": found}
        if kind == "hollow":
            return self._hollow(request["calls"], Path(request["out"]))
        if kind == "operators":
            return {"operators": self._operators(request["calls"][0])}
        raise ValueError(f"unknown request {kind!r}")

    def _hollow(self, calls: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        """One call with kernels that do nothing: torch's operators, and what came of it (``calls`` None: it raised)."""
        restore = _hollow_kernels()
        try:
            operators, found = Counter[str](), None
            with contextlib.suppress(Exception):  # over garbage
                self._operators(calls[0], operators)
            with contextlib.suppress(Exception):
                found = self._case(calls, out)
            return {"operators": operators, "calls": found}
        finally:
            restore()

    def _case(self, calls: list[dict[str, Any]], out: Path, interleaved: bool = False) -> list[dict[str, Any]]:
        """Run every call, and only then write down what came of each: results must outlive later calls.

        Args:
            interleaved: run the second call before the first one's backward.
        """
        buffers: list[Buffers] = []
        upstreams: list[Buffers] = []
        results: list[tuple[dict[str, Tensor], dict[str, Tensor | None], float]] = []
        for call in calls:
            if "same_as" in call:
                buffers.append(buffers[call["same_as"]])
                upstreams.append(upstreams[call["same_as"]])
                continue
            if call["reuse"] is None:
                buffers.append(Buffers(self.device, call["tensors"]))
            else:
                buffers.append(buffers[call["reuse"]])
            upstreams.append(Buffers(self.device, call["upstream"]))
        waiting = None
        for number, call in enumerate(calls):
            fresh.turn(number)
            if call.get("reuse") is not None:
                buffers[number].overwrite(call["tensors"])
            begin = time.perf_counter()
            leaves = buffers[number].leaves(call.get("needs"))
            outputs = self._forward(leaves, call.get("mode", "plain"))
            if interleaved and number == 0:
                waiting = outputs, leaves
                results.append((outputs, {}, 0.0))
                continue
            if call.get("mode") == "twice":
                self._backward(outputs, leaves, upstreams[number].views, keep=True)
            gradients = self._backward(outputs, leaves, upstreams[number].views)
            results.append((outputs, gradients, time.perf_counter() - begin))
            if waiting is not None:
                results[0] = (waiting[0], self._backward(*waiting, upstreams[0].views), 0.0)
                waiting = None
        written = []
        for number, (outputs, gradients, seconds) in enumerate(results):
            given = "same_as" not in calls[number]
            groups: dict[str, Mapping[str, Tensor | None]] = {
                "outputs": outputs,
                "gradients": gradients,
                "inputs": buffers[number].storages if given else {},
                "upstream": upstreams[number].storages if given else {},
            }
            report: dict[str, Any] = {"seconds": seconds} | {group: {} for group in groups}
            for group, tensors in groups.items():
                for name, tensor in tensors.items():
                    if tensor is not None:
                        report[group][name] = _write(tensor, out / f"{number}.{group}.{name}")
            written.append(report)
        return written

    def _forward(self, inputs: dict[str, Tensor | None], mode: str) -> dict[str, Tensor]:
        assert self.operator is not None
        operator, given = self.operator, list(inputs)

        def run(*values: Tensor | None) -> tuple[Tensor, ...]:
            return operator(**dict(zip(given, values, strict=True)))

        if mode == "recompute":
            found = checkpoint(run, *inputs.values(), use_reentrant=False)
        elif mode == "compile":
            found = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs.values())
        else:
            found = run(*inputs.values())
        return dict(zip(operator.outputs, found, strict=True))

    def _backward(
        self,
        outputs: dict[str, Tensor],
        inputs: dict[str, Tensor | None],
        upstream: dict[str, Tensor | None],
        keep: bool = False,
    ) -> dict[str, Tensor | None]:
        leaves = {n: t for n, t in inputs.items() if t is not None and t.requires_grad}
        sources = [(outputs[n], g) for n, g in upstream.items() if g is not None]
        if not leaves or not sources:
            return {}
        found = torch.autograd.grad(
            [s for s, _ in sources],
            list(leaves.values()),
            [g for _, g in sources],
            retain_graph=keep,
            allow_unused=True,
        )
        return dict(zip(leaves, found, strict=True))

    def _operators(self, call: dict[str, Any], seen: Counter[str] | None = None) -> dict[str, int]:
        """Torch operators on floating tensors in the candidate's host code, forward and backward, contiguous inputs.

        Args:
            seen: counted up on the way.
        """
        assert self.operator is not None
        assert self.module is not None
        inputs = Buffers(self.device, call["tensors"]).views
        upstream = {
            n: None if t is None else t.contiguous() for n, t in Buffers(self.device, call["upstream"]).views.items()
        }
        tensors = {n: None if t is None else t.detach().contiguous() for n, t in inputs.items()}
        config = self.operator.config(**tensors)
        needs = frozenset(n for n, t in inputs.items() if t is not None and t.requires_grad)
        fresh.turn(0)
        with _OperatorLog(seen) as log:
            _, saved = self.module.forward(tensors, config)
            grads = {n: upstream.get(n) for n in self.operator.outputs}
            self.module.backward(tensors, saved, grads, needs, config)
        return dict(log.seen)


class _OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run below it and take or give a floating tensor.

    One that makes whole numbers of floating ones, or the other way round, is named so: arithmetic on bits, or on
    fixed points, is arithmetic.
    """

    def __init__(self, seen: Counter[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter() if seen is None else seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
            self.seen[func._schema.name + (" between kinds of numbers" if _converts(func, args, result) else "")] += 1
        return result


_CONVERTING = {"aten::view", "aten::_to_copy", "aten::copy_"}


def _converts(func: Any, args: Any, result: Any) -> bool:
    """Whether an operator that keeps values (or bits) turns floating numbers into others or back."""
    if func._schema.name not in _CONVERTING or not isinstance(result, Tensor):
        return False
    given = [a for a in args if isinstance(a, Tensor)]
    return any(a.is_floating_point() != result.is_floating_point() for a in given)


def _write(tensor: Tensor, path: Path) -> dict[str, Any]:
    """The tensor's whole storage as bytes, and how the tensor lies in it."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    image = Image(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        elements=storage.numel(),
    )
    save(storage, path)
    return image.to_json() | {"device": tensor.device.type, "plain": _is_plain(tensor)}


def _is_plain(t: Tensor) -> bool:
    """Whether the bytes of its storage are all there is to a tensor: no subclass, no flag that changes their sense."""
    return type(t) is Tensor and t.layout is torch.strided and not (t.is_neg() or t.is_conj() or t.is_quantized)


def _hollow_kernels() -> Any:
    """Make every Triton launch do nothing; returns what puts them back."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kept: list[tuple[Any, str, Any]] = [
        (InterpretedFunction, "run", InterpretedFunction.run),
        (JITFunction, "run", JITFunction.run),
        (Launcher, "__call__", Launcher.__call__),
    ]
    for cls, name, _ in kept:
        setattr(cls, name, lambda self, *args, **kwargs: None)

    def restore() -> None:
        for cls, name, run in kept:
            setattr(cls, name, run)

    return restore


def prepare() -> None:
    """What a warm parent does once for all its forks: the late imports of torch and Triton."""
    import torch._inductor.config  # by the switch for deterministic algorithms
    import triton.compiler.code_generator  # noqa: F401  # by the interpreter's first launch

    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))  # the compiler's own
    torch._dynamo.reset()


def main() -> None:
    """``python -m onboarding.stages.judge.child REQUESTS REPLIES DEVICE [unfilled]``."""
    requests: IO[str] = os.fdopen(int(sys.argv[1]))
    replies: IO[str] = os.fdopen(int(sys.argv[2]), "w")
    device = torch.device(sys.argv[3])
    torch.set_num_threads(1)
    if "unfilled" not in sys.argv[4:]:  # a tool that watches memory itself must see it as it is
        fresh.watch()
    if device.type == "cuda":
        torch.zeros(1, device=device)
    session = Session(device)

    def reply(**data: Any) -> None:
        replies.write(json.dumps(data) + "\n")
        replies.flush()

    gpu = torch.cuda.get_device_name() if device.type == "cuda" else ""
    reply(ok=True, torch=torch.__version__, triton=triton.__version__, gpu=gpu)
    for line in requests:
        try:
            answer = session.serve(json.loads(line))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            inside = next((f"{f.name}, line {f.lineno}" for f in reversed(where) if "candidate" in f.filename), "")
            traceback.print_exc()
            reply(ok=False, error=f"{type(error).__name__}: {error}"[:2000], where=inside)
        else:
            reply(ok=True, **answer)


if __name__ == "__main__":
    main()
