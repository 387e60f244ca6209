"""The loss hook: a causal language model's own forward, with logits that exist only if somebody looks at them.

While the model computes a loss, its head returns :class:`Logits`: a tensor that remembers the hidden states, the head
and the scaling or capping that the model's forward does to it. The model's loss function, replaced on this instance,
hands these to the kernel. Anything else that touches the tensor gets ordinary logits, made at that moment.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KEPT = frozenset(
    {"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide", "tanh", "float", "to"}
    | {"contiguous"}
)
"""Pointwise operations that are remembered instead of done; which function they make is compared with the kernel's."""
SAMPLES = 33


class Logits(torch.Tensor):
    """The logits that a head would give, not computed yet.

    It has their shape, dtype and device and requires no gradient itself; the tensor that :meth:`made` gives does.
    """

    hidden: Tensor
    head: nn.Linear
    done: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    """Functions applied since, with their other arguments."""
    changed: list[bool]
    """Holds one True as soon as somebody may have written into the real logits."""
    computed: list[Tensor]
    """The real logits, once they were needed."""

    @staticmethod
    def of(hidden: Tensor, head: nn.Linear, done: list[Any], dtype: torch.dtype) -> Logits:
        """hidden [..., D] under a head [V, D], after the functions in ``done``."""
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        logits: Logits = torch.Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=hidden.device)
        logits.hidden, logits.head, logits.done, logits.changed, logits.computed = hidden, head, done, [], []
        return logits

    def made(self) -> Tensor:
        """The real logits, computed on first use."""
        if not self.computed:
            value = nn.functional.linear(self.hidden, self.head.weight, self.head.bias)
            for function, args, kwargs in self.done:
                value = function(value, *args, **kwargs)
            self.computed.append(value)
        return self.computed[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in ("dim", "size", "numel", "is_floating_point", "is_complex"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first: Any = args[0] if args else None
        plain = isinstance(first, Logits) and not any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values()))
        if name in KEPT and plain and not first.changed:
            with torch.no_grad():
                dtype = func(torch.zeros((), dtype=first.dtype), *args[1:], **kwargs).dtype
            return Logits.of(first.hidden, first.head, [*first.done, (func, args[1:], kwargs)], dtype)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Logits) and changes(name):
                value.changed.append(True)
        args, kwargs = torch.utils._pytree.tree_map_only(Logits, Logits.made, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(Logits, Logits.made, (args, kwargs or {}))
        return func(*args, **kwargs)


def changes(name: str) -> bool:
    """Whether a function of this name may write into its argument: ``mul_``, ``__imul__``, ``__setitem__``."""
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


class _Training(threading.local):
    """How many forwards of models with labels are running in this thread."""

    depth = 0


_training = _Training()


@contextmanager
def _computing_a_loss(wanted: bool) -> Any:
    _training.depth += wanted
    try:
        yield
    finally:
        _training.depth -= wanted


def install(hooks: Any, module: nn.Module, swap: Any) -> Callable[[], None]:
    """Give the model's head deferred logits and its loss function the kernel; returns the undo function."""
    model: Any = module
    head = model.get_submodule(swap.attributes["head"])
    own_loss = model.loss_function
    before = model.__dict__.get("_loss_function")

    def forward(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = inspect.signature(type(self).forward).bind_partial(self, *args, **kwargs).arguments.get("labels")
        with _computing_a_loss(labels is not None):
            return original(*args, **kwargs)

    def head_forward(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _training.depth:
            return original(*args, **kwargs)
        try:
            return _deferred(hooks, self, *args, **kwargs)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return original(*args, **kwargs)

    def loss_function(*args: Any, **kwargs: Any) -> Any:
        try:
            return _loss(hooks, swap, own_loss, args, kwargs)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return own_loss(*args, **kwargs)

    undo_forward, undo_head = hooks._replace_forward(module, forward), hooks._replace_forward(head, head_forward)
    model._loss_function = loss_function

    def undo() -> None:
        undo_head()
        undo_forward()
        if before is None:
            model.__dict__.pop("_loss_function", None)
        else:
            model._loss_function = before

    return undo


def _deferred(hooks: Any, head: nn.Module, *args: Any, **kwargs: Any) -> Logits:
    """Logits of a plain linear head (a gathered one of FSDP's is one); adapters and quantised heads compute theirs."""
    (hidden,) = hooks._only(args, kwargs, 1)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise hooks.Uncovered(f"the head is a {type(head).__name__}")
    if torch.compiler.is_compiling():
        raise hooks.Uncovered("the compiler sees ordinary logits")
    tensors = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    if len(list(head.parameters())) > len(tensors) - 1:
        raise hooks.Uncovered("the head has parameters besides weight and bias: an adapter's")
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        raise hooks.Uncovered("the head's weight is not a plain tensor")
    if torch.is_autocast_enabled(hidden.device.type):
        raise hooks.Uncovered("autocast")
    hooks._covered(*tensors)
    return Logits.of(hidden, head, [], hidden.dtype)


def _loss(hooks: Any, swap: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A call in the convention of transformers' causal loss: (logits, labels, vocab_size, ...) -> loss."""
    given, _ = hooks._given(inspect.signature(own), args, kwargs)
    logits, spec = given.get("logits"), swap.spec
    if not isinstance(logits, Logits):
        raise hooks.Uncovered("the logits were computed")
    if logits.changed:
        raise hooks.Uncovered("the logits were changed")
    if not same_function(logits.done, spec):
        raise hooks.Uncovered("what happens to the logits is not what the kernel computes")
    classes, hidden_size = logits.head.weight.shape
    if given.get("vocab_size", classes) != classes:
        raise hooks.Uncovered(f"vocab_size {given['vocab_size']} where the head has {classes}")
    ignore = given.get("ignore_index", spec["ignore_index"])
    if ignore != spec["ignore_index"] or (logits.head.bias is not None) != spec["bias"]:
        raise hooks.Uncovered("ignore_index or bias differs")
    target = given.get("shift_labels")
    if target is None:
        target = nn.functional.pad(given["labels"], (0, 1), value=ignore)[..., 1:]
    if target.numel() * hidden_size != logits.hidden.numel():
        raise hooks.Uncovered("the labels do not match the logits")
    count = given.get("num_items_in_batch")
    if count is not None:
        count = torch.as_tensor(count, device=logits.hidden.device).float().reshape(())
    tensors = {"bias": logits.head.bias} if spec["bias"] else {}
    loss: Tensor = swap.call(
        x=logits.hidden.reshape(-1, hidden_size),
        weight=logits.head.weight,
        target=target.reshape(-1).to(logits.hidden.device).long(),
        denominator=count,
        **tensors,
    )[0]
    return loss


def same_function(done: list[Any], spec: dict[str, Any]) -> bool:
    """Whether the functions applied to the logits are the kernel's scale and cap, on values up to 100."""
    z = torch.linspace(-100, 100, SAMPLES)
    value = z
    with torch.no_grad():
        for function, args, kwargs in done:
            # the dtype and the device that a conversion asks for are the logits', not the samples'
            value = value if function.__name__ in ("float", "to", "contiguous") else function(value, *args, **kwargs)
    return torch.allclose(value, capped(z, spec), rtol=1e-4, atol=1e-5)


def capped(z: Tensor, spec: dict[str, Any]) -> Tensor:
    """What the spec says of logits z before any scaling."""
    z = z * spec["logit_scale"]
    return z if spec["softcap"] is None else spec["softcap"] * torch.tanh(z / spec["softcap"])


def mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    """Why the kernel is not this model's loss, or None: its loss function is tried on a few logits."""
    model: Any = module
    head = getattr(model, names["head"], None)
    if not isinstance(head, nn.Module) or not callable(getattr(model, "loss_function", None)):
        return "no head or no loss function"
    if (getattr(head, "bias", None) is not None) != spec["bias"]:
        return "bias" if spec["bias"] else "a bias where the kernel has none"
    logits = torch.linspace(-2, 2, 24).reshape(1, 4, 6).sin() * 3
    labels = torch.tensor([[1, 2, -100, 4]])
    shifted = torch.tensor([2, -100, 4, -100])
    for count in (None, torch.tensor(7)):
        expected = nn.functional.cross_entropy(logits[0], shifted, reduction="mean" if count is None else "sum")
        expected = expected if count is None else expected / count
        try:
            found = model.loss_function(logits=logits, labels=labels, vocab_size=6, num_items_in_batch=count)
        except Exception as error:  # somebody else's function, another convention
            return f"its loss function: {type(error).__name__}"
        if not isinstance(found, Tensor) or not torch.allclose(found, expected, rtol=1e-5):
            return "its loss function computes something else"
    return None
