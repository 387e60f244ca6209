"""Runs the reference of a novel operator: confined, beside the judge, never in the candidate's process.

``python -m onboarding.stages.judge.novel_child REQUESTS REPLIES DEVICE`` serves JSON lines like the candidate's child:
``load`` compiles the source, ``evaluate`` answers with outputs, and gradients for a given upstream, as raw bytes.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_templates.loading import load_module
from kernel_templates.novel import Signature
from kernel_templates.rounding import rounded
from onboarding.stages.judge.images import load, save

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
"""Operators whose floating operands go to matrix units."""


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the operands of matrix products, forward and backward: what any kernel on matrix units does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in PRODUCTS:
            # the added term of addmm is accumulated in fp32, never an operand
            first = 1 if func._schema.name.startswith(("aten::addmm", "aten::baddbmm")) else 0
            args = (*args[:first], *pytree.tree_map(self._round, tuple(args[first:])))
        return func(*args, **(kwargs or {}))

    def _round(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.dtype).to(value.dtype)
        return value


class Session:
    """Serves the judge's requests for one reference."""

    def __init__(self) -> None:
        self.signature: Signature | None = None
        self.run: Callable[[dict[str, Tensor]], Any] | None = None

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        if request["kind"] == "load":
            self.signature = Signature.from_json(request["signature"])
            self.run = entry_point(load_module(Path(request["source"])), self.signature)
            return {}
        if request["kind"] == "evaluate":
            return self._evaluate(request)
        raise ValueError(f"unknown request {request['kind']!r}")

    def _evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        dtype = getattr(torch, request["rounded"]) if request["rounded"] else None
        tensors, leaves = {}, {}
        for name, entry in request["tensors"].items():
            tensor = _read(entry)
            if entry["requires_grad"]:
                leaves[name] = tensor.requires_grad_()
            activation = entry["activation"] and dtype is not None
            tensors[name] = rounded(tensor, dtype) if activation and dtype is not None else tensor
        with RoundedProducts(dtype) if dtype is not None else contextlib.nullcontext():
            outputs = self._outputs(tensors, dtype)
            answer: dict[str, Any] = {"outputs": _write(outputs, Path(request["out"]), "output")}
            upstream = {n: _read(entry) for n, entry in request["upstream"].items() if outputs[n].requires_grad}
            if leaves and upstream:
                found = torch.autograd.grad(
                    [outputs[n] for n in upstream], list(leaves.values()), list(upstream.values()), allow_unused=True
                )
                gradients = {
                    n: torch.zeros_like(leaf) if g is None else g
                    for (n, leaf), g in zip(leaves.items(), found, strict=True)
                }
                answer["gradients"] = _write(gradients, Path(request["out"]), "gradient")
        return answer

    def _outputs(self, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        assert self.run is not None
        assert self.signature is not None
        result = self.run(tensors)
        names = [t.name for t in self.signature.outputs]
        if isinstance(result, Tensor):
            result = (result,)
        if not isinstance(result, dict):
            result = dict(zip(names, result, strict=True))
        if set(result) != set(names):
            raise ValueError(f"the reference returns {sorted(result)} instead of {names}")
        outputs = {}
        for entry in self.signature.outputs:
            value = result[entry.name]
            if dtype is not None and entry.dtype == "activation":
                value = rounded(value, dtype)
            outputs[entry.name] = value
        return outputs


def entry_point(module: Any, signature: Signature) -> Callable[[dict[str, Tensor]], Any]:
    """What computes the outputs from the inputs by name: a function, or a module class with its parameters given."""
    function = getattr(module, "reference", None)
    if callable(function):
        return lambda tensors: function(**tensors)
    made = getattr(module, "Reference", None)
    if not (inspect.isclass(made) and issubclass(made, nn.Module)):
        raise ValueError("the source defines neither reference(**tensors) nor class Reference(nn.Module)")

    def run(tensors: dict[str, Tensor]) -> Any:
        dims = signature.bind({n: tuple(t.shape) for n, t in tensors.items()})
        wanted = inspect.signature(made.__init__).parameters
        with torch.device("meta"):
            instance = made(**{n: size for n, size in dims.items() if n in wanted})
        held = dict([*instance.named_parameters(), *instance.named_buffers()])
        given = {path: tensors[path.replace(".", "_")] for path in held}
        rest = {n: t for n, t in tensors.items() if n not in {path.replace(".", "_") for path in held}}
        return torch.func.functional_call(instance, given, kwargs=rest)

    return run


def _read(entry: dict[str, Any]) -> Tensor:
    shape = tuple(entry["shape"])
    count = 1
    for size in shape:
        count *= size
    return load(Path(entry["file"]), getattr(torch, entry["dtype"]), count).reshape(shape)


def _write(tensors: dict[str, Tensor], out: Path, what: str) -> dict[str, Any]:
    facts = {}
    for name, tensor in tensors.items():
        path = out / f"{what}.{name}"
        save(tensor.detach().contiguous().reshape(-1), path)
        facts[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return facts


def requests_of(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """The requests, one a line."""
    for line in stream:
        yield json.loads(line)


def main() -> None:
    """Serve until the pipe closes."""
    replies: IO[str] = os.fdopen(int(sys.argv[2]), "w")
    torch.set_num_threads(1)
    session = Session()

    def reply(**data: Any) -> None:
        replies.write(json.dumps(data) + "\n")
        replies.flush()

    reply(ok=True, torch=torch.__version__)
    for request in requests_of(os.fdopen(int(sys.argv[1]))):
        try:
            answer = session.serve(request)
        except Exception as error:
            traceback.print_exc()
            reply(ok=False, error=f"{type(error).__name__}: {error}"[:2000])
        else:
            reply(ok=True, **answer)


if __name__ == "__main__":
    main()
