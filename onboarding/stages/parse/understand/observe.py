"""One real step of the reduced twin, with everything that its modules and marked functions were given and gave back."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_utils import AttentionInterface

from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.inputs import drawn_values, repeated, with_image
from onboarding.stages.parse.marked import marked_functions, modeling_modules
from onboarding.stages.parse.structure import embedding_of

BATCH, TOKENS = 2, 72
"""Two sequences, longer than four of the twin's windows and no multiple of its chunks."""
_LINEAR = F.linear
_CHOICES = {torch.topk, Tensor.topk}
_PRODUCTS = {
    torch.matmul, Tensor.matmul, torch.einsum, torch.bmm, Tensor.bmm, Tensor.__matmul__, torch.baddbmm, Tensor.baddbmm,
}  # fmt: skip
_FUSED = F.scaled_dot_product_attention
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(eq=False)
class Call:
    """Something that ran: a module, a marked function, an attention function, a linear layer, a choice of the best."""

    kind: str
    """``module``, ``function``, ``attention``, ``linear``, ``topk``, ``product`` or ``softmax``."""
    path: str
    """Name of the module that ran, or in whose forward it ran."""
    name: str
    inputs: dict[str, Any]
    output: Any = None
    function: Callable[..., Any] | None = None
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """Arguments as they were passed."""
    position: int = 0
    """Place in the order of starts."""
    end: int = 0
    """Of a module: the place of the first call that started after it had ended."""
    round: int = 0
    """Of a module: how often it had been called before."""

    def again(self, replace: Mapping[int, Any], run: Callable[..., Any] | None = None) -> Any:
        """Run it once more with some arguments replaced.

        Args:
            replace: id of an argument tensor -> what stands in its place.
            run: what to call instead of ``function``.
        """
        args, kwargs = tree_map(lambda value: replace.get(id(value), value), self.given)
        function = run or self.function
        assert function is not None
        with quiet():
            return function(*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        """Its tensor inputs, parameters left out."""
        return [t for t in tree_leaves(self.inputs) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]

    def results(self) -> list[Tensor]:
        """Its tensor outputs."""
        return [t for t in tree_leaves(self.output) if isinstance(t, Tensor)]


@dataclass
class Observation:
    """All calls of one forward pass, in the order in which they started."""

    model: nn.Module
    ids: Tensor
    calls: list[Call] = field(default_factory=list)
    output: Any = None
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model."""

    def inside(self, path: str, kind: str | None = None) -> list[Call]:
        """Calls at or below a module."""
        return [c for c in self.calls if (kind is None or c.kind == kind) and under(c.path, path)]

    def during(self, call: Call, kind: str | None = None) -> list[Call]:
        """Calls at or below a module in one call of it; of another observation's call, in the same round here."""
        own = next((c for c in self.calls if c.kind == "module" and (c.path, c.round) == (call.path, call.round)), None)
        found = self.inside(call.path, kind)
        return found if own is None else [c for c in found if own.position <= c.position < own.end]

    def module(self, path: str) -> Call | None:
        """The first call of a module."""
        return next((c for c in self.calls if c.kind == "module" and c.path == path), None)


def under(path: str, base: str) -> bool:
    """Whether a module path is ``base`` or lies below it."""
    return not base or path == base or path.startswith(base + ".")


class _Recorder(TorchFunctionMode):
    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self.observation = observation
        self.names = _first_names(observation.model)
        self.stack: list[Call] = []
        self.blocks = {
            id(m) for parent in observation.model.modules() if isinstance(parent, nn.ModuleList) for m in parent
        }
        self.seen: set[int] = set()
        self.counted = 0
        """Added to every count 0, 1, 2 ... as long as the sequence that the model makes itself."""
        self.rounds: Counter[str] = Counter()
        self.attending = 0
        """Attention functions that are running: what they call inside is theirs."""
        self.muted: list[int] = []
        """Blocks that run a second time (looped models): one round is enough."""

    def add(self, kind: str, name: str, inputs: dict[str, Any], function: Any = None, path: str | None = None) -> Call:
        here = path if path is not None else self.stack[-1].path if self.stack else ""
        call = Call(kind, here, name, inputs, function=function, position=len(self.observation.calls))
        if not self.muted:
            self.observation.calls.append(call)
        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _FUSED and not self.attending:
            return self.fused(*args, **kwargs)
        if func is torch.arange and self.counted:
            count = func(*args, **kwargs)
            return count + self.counted if count.shape[0] == self.observation.ids.shape[1] else count
        if func is _LINEAR:
            given = dict(zip(("x", "weight", "bias"), args, strict=False), **_renamed(kwargs))
            call = self.add("linear", "linear", given)
        elif func is torch.addmm and len(args) == 3:  # Conv1D of GPT-2
            call = self.add("linear", "addmm", {"x": args[1], "weight": args[2], "bias": args[0]})
        elif func in _CHOICES:
            call = self.add("topk", "topk", {"scores": args[0], "k": args[1] if len(args) > 1 else kwargs.get("k")})
        elif func in _PRODUCTS:
            call = self.add("product", getattr(func, "__name__", "matmul"), {"args": (*args, *kwargs.values())})
        elif func in _SOFTMAX:
            call = self.add("softmax", "softmax", {"x": args[0] if args else kwargs["input"]})
        else:
            return func(*args, **kwargs)
        call.output = func(*args, **kwargs)
        return call.output

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) in self.blocks:
            if id(module) in self.seen and not self.stack_holds_block():
                self.muted.append(id(module))
            self.seen.add(id(module))
        path = self.names.get(id(module), "")
        call = self.add("module", type(module).__name__, _bound(module.forward, args, kwargs), module, path)
        call.given = (args, kwargs)
        call.round = self.rounds[path]
        self.rounds[path] += not self.muted
        self.stack.append(call)

    def after(self, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        call = self.stack.pop()
        call.output, call.end = output, len(self.observation.calls)
        if self.muted and self.muted[-1] == id(module):
            self.muted.pop()

    def stack_holds_block(self) -> bool:
        """Whether a block is already running: lists inside a block (experts) may be called again."""
        return any(id(call.function) in self.blocks for call in self.stack)

    def attention(self, default: Callable[..., Any]) -> Callable[..., Any]:
        """The attention function of a modeling file, watched."""

        def run(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
            mask = rest[0] if rest else kwargs.pop("attention_mask", None)
            inputs = {"q": query, "k": key, "v": value, "mask": mask, "rest": rest[1:], "kwargs": dict(kwargs)}
            inputs["module"] = module
            call = self.add("attention", getattr(default, "__name__", "attention"), inputs)

            def again(q: Tensor, k: Tensor, v: Tensor, **changed: Any) -> Any:
                return default(module, q, k, v, changed.pop("mask", mask), *rest[1:], **{**kwargs, **changed})[0]

            call.function = again
            self.attending += 1
            try:
                output = default(module, query, key, value, mask, *rest[1:], **kwargs)
            finally:
                self.attending -= 1
            call.output = output[0]
            return output

        return run

    def fused(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """torch's own attention, called by a module itself: noted as an attention function's call would be."""
        options = {"scaling": kwargs["scale"]} if kwargs.get("scale") is not None else {}
        inputs: dict[str, Any] = {"q": query, "k": key, "v": value, "mask": attn_mask, "rest": (), "kwargs": options}
        inputs["module"] = self.stack[-1].function if self.stack else self.observation.model
        call = self.add("attention", "scaled_dot_product_attention", inputs)

        def again(q: Tensor, k: Tensor, v: Tensor, **changed: Any) -> Any:
            return _FUSED(q, k, v, changed.pop("mask", attn_mask), **kwargs).transpose(1, 2)

        call.function = again
        output = _FUSED(query, key, value, attn_mask, **kwargs)
        call.output = output.transpose(1, 2)
        return output

    def function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A marked function, watched."""

        def run(*args: Any, **kwargs: Any) -> Any:
            call = self.add("function", name, _bound(function, args, kwargs), function)
            call.given = (args, kwargs)
            call.output = function(*args, **kwargs)
            return call.output

        return run


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"x" if name == "input" else name: value for name, value in kwargs.items()}


def _first_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    return names


def _bound(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name, those that go into ``*args`` and ``**kwargs`` spread out."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{f"arg{i}": a for i, a in enumerate(args)}, **kwargs}
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            given.update({f"{name}{i}": a for i, a in enumerate(value)})
        else:
            given[name] = value
    return given


@contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    model = recorder.observation.model
    with ExitStack() as stack:
        for module in model.modules():
            before = module.register_forward_pre_hook(recorder.before, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(recorder.after, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        original = AttentionInterface.get_interface

        def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return recorder.attention(original(self, implementation, default))

        stack.enter_context(patch.object(AttentionInterface, "get_interface", get_interface))
        for file in modeling_modules(model):
            for marked in marked_functions(file):
                replaced = recorder.function(marked.kernel, marked.function)
                stack.enter_context(patch.object(file, marked.attribute, replaced))
        yield


def tokens_for(model: nn.Module) -> int:
    """A sequence that is long enough for a compressed entry of every attention to end."""
    rates = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "compress" in name and isinstance(value, int) and TOKENS // 2 < value <= 256
    ]
    return max([TOKENS, *(rate + 12 for rate in rates)])


def run_ids(model: Any, seed: int, tokens: int = TOKENS) -> Tensor:
    """Random plain-text token ids, [BATCH, tokens]."""
    own = getattr(model.config.get_text_config(), "vocab_size", None)
    vocabulary = min(256, int(own or embedding_of(model).shape[0]))
    return torch.randint(vocabulary, (BATCH, tokens), generator=torch.Generator().manual_seed(seed))


def arguments_for(model: Any, ids: Tensor) -> Iterator[dict[str, Any]]:
    """What to call a class with, without labels: text, then what goes with an image or with another model's states."""
    yield {"input_ids": ids, "use_cache": False}
    generator = torch.Generator().manual_seed(5)
    for given in with_image(model, ids):
        drawn = {k: drawn_values(k, v, generator) for k, v in repeated(given, ids.shape[0]).items() if k != "labels"}
        yield {**drawn, "use_cache": False}


def observe(model: Any, *, seed: int = 0, shift: int = 0, stream: int | None = None, own: bool = False) -> Observation:
    """Run the twin once, dropout off, gradients on.

    Args:
        model: the twin.
        seed: of the token ids.
        shift: added to every position that the model counts from 0.
        stream: of positions that come in several rows (time, height, width), move this one alone.
        own: move on what the model's code counts itself, in place of what its modules are given.
    """
    model.eval()
    ids = run_ids(model, seed, tokens_for(model))
    failure: Exception | None = None
    for given in arguments_for(model, ids):
        observation = Observation(model, ids, given=given)
        recorder = _Recorder(observation)
        recorder.counted = shift if own else 0
        try:
            with (
                quiet(),
                _watched(recorder),
                _shifted(model, 0 if own else shift, stream),
                recorder,
                torch.enable_grad(),
            ):
                observation.output = model(**given)
        except Exception as error:  # these are not the arguments
            failure = failure or error
            continue
        return observation
    assert failure is not None
    raise failure


@contextmanager
def _shifted(model: nn.Module, shift: int, stream: int | None) -> Iterator[None]:
    """Add to the positions that modules are given, wherever they count 0, 1, 2 ... along the sequence."""
    handles = []

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        rotary = not any(True for _ in module.parameters())
        if next(module.children(), None) is not None and not rotary:
            return None
        moved = tuple(_moved(a, shift, rotary, stream) for a in args)
        return moved, {name: _moved(value, shift, rotary, stream) for name, value in kwargs.items()}

    if shift:
        handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(value: Any, shift: int, rotary: bool, stream: int | None) -> Any:
    """A tensor of positions moved on: any integers that a module without weights reads, else a count 0, 1, 2 ..."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool or value.dim() < 1:
        return value
    if stream is not None:
        if not (rotary and value.dim() == 3 and value.shape[0] > stream):
            return value
        moved = value.clone()
        moved[stream] += shift
        return moved
    if rotary:
        return value + shift
    steps = torch.arange(value.shape[-1])
    counts = value.shape[-1] > 1 and bool((value - value[..., :1] == steps).all()) and bool((value[..., 0] < 8).all())
    return value + shift if counts else value
