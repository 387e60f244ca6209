"""How each kind of operator is put in a module's place.

Every ``install`` returns the function that undoes it. A replaced forward is a method bound to its instance, so a deep
copy of the model carries it over to the copy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Undo = Callable[[], None]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_registered = count()


def install(
    binding: dict[str, Any],
    entry: dict[str, Any],
    attributes: dict[str, str],
    module: nn.Module,
    name: str,
    op: Any,
    applied: Any,
) -> Undo:
    """Make ``module`` use ``op``; returns the undo function.

    Args:
        binding: hook and, for a function hook, the function's name.
        entry: the kernel's entry of ``bundle.json``.
        attributes: tensor name -> attribute of the module.
        module: the instance to patch.
        name: of the module in the model.
        op: the kernel.
        applied: counts calls and notes fallbacks.
    """
    hook: str = binding["hook"]
    swap = Swap(entry, binding, attributes, name, op, applied)
    if hook == "experts":
        return _install_experts(module, swap)
    if hook in CALLS:
        return _install_function(module, swap)
    forward = {
        "norm": _norm,
        "gated_norm": _gated_norm,
        "gated_mlp": _gated_mlp,
        "hyper_connection": _hyper_connection,
    }[hook]
    return _replace_forward(module, functools.partial(_run, forward, swap))


class Swap:
    """One kernel in one module."""

    def __init__(
        self,
        entry: dict[str, Any],
        binding: dict[str, Any],
        attributes: dict[str, str],
        name: str,
        op: Any,
        applied: Any,
    ) -> None:
        self.spec: dict[str, Any] = entry["spec"]
        self.digest: str = entry["digest"]
        self.hook: str = binding["hook"]
        self.function: str = binding.get("function") or ""
        self.attributes = attributes
        self.name = name
        self.op = op
        self.applied = applied

    def __deepcopy__(self, memo: dict[int, Any]) -> Swap:
        return self  # holds nothing of the module

    def call(self, **tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Run the kernel and count it."""
        self.applied.count(self.digest, self.name)
        results: tuple[Tensor, ...] = self.op(**tensors)
        return results


class Uncovered(Exception):
    """The call is outside what the kernel computes; the model's own code takes it."""


# ---- replaced forwards ------------------------------------------------------------------------------------------


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    before = module.__dict__.get("forward")
    own = type(module).forward if before is None else before
    if isinstance(own, MethodType) and own.__self__ is module:
        own = own.__func__  # of another hook of ours: a deep copy must call it on itself
    bound = before is not None and own is before

    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, own if bound else MethodType(own, self), *args, **kwargs)

    module.forward = MethodType(replaced, module)

    def undo() -> None:
        if before is not None:
            module.forward = before
        else:
            module.__dict__.pop("forward", None)

    return undo


def _run(
    compute: Callable[..., Any], swap: Swap, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    try:
        return compute(swap, module, *args, **kwargs)
    except Uncovered as reason:
        swap.applied.fallbacks[swap.name] = str(reason)
        return original(*args, **kwargs)


def _covered(*tensors: Tensor) -> None:
    """Kernels take one floating dtype throughout; anything else would promote differently than the model does."""
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise Uncovered(f"dtypes {', '.join(sorted(str(d) for d in dtypes))}")


def _norm(swap: Swap, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    x = _only(args, kwargs, 1)[0]
    if not swap.spec["weighted"]:
        _covered(x)
        return swap.call(x=x)[0]
    weight = getattr(module, swap.attributes["weight"])
    more = {"bias": getattr(module, swap.attributes["bias"])} if swap.spec.get("bias") else {}
    _covered(x, weight, *more.values())
    return swap.call(x=x, weight=weight, **more)[0]


def _gated_norm(swap: Swap, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    x, gate = _only(args, kwargs, 2)
    if gate is None:
        raise Uncovered("no gate")
    if not swap.spec["weighted"]:
        _covered(x, gate)
        return swap.call(x=x, gate=gate)[0]
    weight = getattr(module, swap.attributes["weight"])
    _covered(x, gate, weight)
    return swap.call(x=x, weight=weight, gate=gate)[0]


def _gated_mlp(swap: Swap, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The projections stay modules, so that adapters, sharding and quantised linears keep working."""
    (x,) = _only(args, kwargs, 1)
    down = getattr(module, swap.attributes["down"])
    if swap.spec["layout"] != "separate":
        gate_up = getattr(module, swap.attributes["gate_up"])(x)
        _covered(gate_up)
        return down(swap.call(gate_up=gate_up)[0])  # type: ignore[no-any-return]
    gate = getattr(module, swap.attributes["gate"])(x)
    up = getattr(module, swap.attributes["up"])(x)
    _covered(gate, up)
    return down(swap.call(gate=gate, up=up)[0])  # type: ignore[no-any-return]


def _hyper_connection(swap: Swap, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    x = _only(args, kwargs, 1)[0]
    parameters = {name: getattr(module, swap.attributes[name]) for name in ("fn", "base", "scale")}
    for t in (x, *parameters.values()):
        _covered(t)  # each may have its own dtype: the model, too, computes in fp32
    if x.shape[-2] != swap.spec["streams"]:
        raise Uncovered(f"{x.shape[-2]} streams where the kernel has {swap.spec['streams']}")
    names = ["h", *(["post"] if swap.spec["post"] else []), *(["comb"] if swap.spec["rounds"] else [])]
    found = dict(zip(names, swap.call(x=x, **parameters), strict=True))
    order = swap.attributes["returns"].split()
    return found[order[0]] if len(order) == 1 else tuple(found[name] for name in order)


def _only(args: tuple[Any, ...], kwargs: dict[str, Any], expected: int) -> list[Any]:
    values = [*args, *kwargs.values()]
    if len(values) != expected or not all(isinstance(v, Tensor) for v in values[:1]):
        raise Uncovered(f"{len(values)} arguments")
    return values


# ---- experts: transformers' own interface -----------------------------------------------------------------------


def _install_experts(module: nn.Module, swap: Swap) -> Undo:
    """Register an implementation under a fresh name and let this module's own copy of the config ask for it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    target: Any = module
    before: Any = target.config
    key = f"onboard-{swap.digest}-{next(_registered)}"

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = {n: getattr(self, a) for n, a in swap.attributes.items() if swap.spec["bias"] or "bias" not in n}
        try:
            _covered(hidden_states, *weights.values())
        except Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            eager = inspect.unwrap(type(self).forward)
            own = ALL_EXPERTS_FUNCTIONS.get_interface(before._experts_implementation or "eager", eager)
            return own(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return swap.call(x=hidden_states, index=top_k_index.long(), scores=top_k_weights, **weights)[0]

    ALL_EXPERTS_FUNCTIONS[key] = forward
    target.config = copy.copy(before)
    target.config._experts_implementation_internal = key

    def undo() -> None:
        target.config = before
        del ALL_EXPERTS_FUNCTIONS[key]

    return undo


# ---- linear attention, short convolution: a function in the model's Python module ----------------------------------


class _Active(threading.local):
    """Which kernel serves which function right now, innermost module last."""

    def __init__(self) -> None:
        self.stack: list[Swap] = []


_active = _Active()


@contextmanager
def _serving(swap: Swap) -> Iterator[None]:
    _active.stack.append(swap)
    try:
        yield
    finally:
        _active.stack.pop()


class Dispatcher:
    """Stands for a function of the model's Python module and looks who is calling.

    Calls from a marked module go to its kernel, all others to the original.
    """

    def __init__(self, original: Callable[..., Any], name: str) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.name = name
        self.signature = inspect.signature(original)
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        swap = next((s for s in reversed(_active.stack) if s.function == self.name), None)
        if swap is None:
            return self.original(*args, **kwargs)
        try:
            return CALLS[swap.hook](swap, self.signature, args, kwargs)
        except Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return self.original(*args, **kwargs)


def _install_function(module: nn.Module, swap: Swap) -> Undo:
    """Mark the module's forward and put a dispatcher in place of the function it calls, while one marked is left."""
    python_module = next(
        sys.modules[cls.__module__]
        for cls in type(module).__mro__
        if hasattr(sys.modules.get(cls.__module__), swap.function)
    )
    dispatcher = getattr(python_module, swap.function)
    if not isinstance(dispatcher, Dispatcher):
        dispatcher = Dispatcher(dispatcher, swap.function)
        setattr(python_module, swap.function, dispatcher)
    dispatcher.users += 1

    def forward(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _serving(swap):
            return original(*args, **kwargs)

    undo_forward = _replace_forward(module, forward)

    def undo() -> None:
        undo_forward()
        dispatcher.users -= 1
        if not dispatcher.users and getattr(python_module, swap.function) is dispatcher:
            setattr(python_module, swap.function, dispatcher.original)

    return undo


def _given(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's arguments by parameter name, and those that the function merely gathers."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    gathered = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    return given, given.pop(gathered, {})


TENSORS = {"query": "q", "key": "k", "value": "v", "q": "q", "k": "k", "v": "v", "g": "g", "beta": "beta"}
"""Argument of the function -> tensor of the spec: transformers spells the first three out, fla does not."""
UNDERSTOOD = {*TENSORS, "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"}
UNDERSTOOD |= {"chunk_size"}
REFUSED_EXTRAS = ("seq_idx", "scale", "safe_gate", "lower_bound", "head_first", "use_gate_in_kernel")


def _linear_attention(
    swap: Swap, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """A call in the convention of transformers and fla: (query, key, value, g, beta, ...) -> (output, final state)."""
    given, extras = _given(signature, args, kwargs)
    for name, value in given.items():
        default = signature.parameters[name].default
        if name not in UNDERSTOOD and value is not None and value is not default and value != default:
            raise Uncovered(f"argument {name}")
    for name in REFUSED_EXTRAS:
        if extras.get(name) is not None:
            raise Uncovered(f"argument {name}")
    if bool(given.get("use_qk_l2norm_in_kernel", False)) != swap.spec["qk_l2norm"]:
        raise Uncovered("the call's q and k normalisation differs")
    tensors: dict[str, Tensor | None] = {
        short: next((given[n] for n, s in TENSORS.items() if s == short and n in given), None)
        for short in TENSORS.values()
    }
    q, v, g = tensors["q"], tensors["v"], tensors["g"]
    assert q is not None
    assert v is not None
    _covered(q, v)
    default = q.shape[-1] ** -0.5
    asked, ours = (default if x is None else x for x in (given.get("scale"), swap.spec.get("scale")))
    if abs(asked / ours - 1) > 1e-6:
        raise Uncovered(f"scale {asked} where the kernel has {ours}")
    decay = "none" if g is None else ("channel" if g.ndim == q.ndim else "head")
    if decay != swap.spec["decay"] or (tensors["beta"] is not None) != swap.spec["delta"]:
        raise Uncovered(f"decay {decay} where the kernel has {swap.spec['decay']}")
    tensors["initial_state"] = given.get("initial_state")
    tensors["cu_seqlens"] = given.get("cu_seqlens", extras.get("cu_seqlens"))
    if tensors["cu_seqlens"] is not None and q.shape[0] != 1:
        raise Uncovered("packed sequences in a batch")
    o, final_state = swap.call(**{n: t for n, t in tensors.items() if t is not None})
    return o, final_state if given.get("output_final_state", False) else None


SCANNED = {"dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus", "dt_limit"}


def _state_space(swap: Swap, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call in the convention of mamba-ssm: (x [B, T, H, P], dt, A, B, C, ...) -> y, and the final state if asked for.

    B and C are keys and queries, dt x the values, dt A the log decay; steps and the skip by D stay torch's.
    """
    given, extras = _given(signature, args, kwargs)
    x = given.pop(next(iter(signature.parameters)))
    final = bool(given.pop("return_final_states", False))
    for name, value in {**given, **extras}.items():
        known = name in SCANNED or value is None or value is False or name not in ("z", "seq_idx", "cu_seqlens")
        if not known:
            raise Uncovered(f"argument {name}")
    if not given.get("dt_softplus", False):
        raise Uncovered("steps without softplus")
    keys, queries = given["B"], given["C"]
    _covered(x, keys, queries)
    steps = given["dt"]
    if given.get("dt_bias") is not None:
        steps = steps + given["dt_bias"].to(steps.dtype)
    low, high = given.get("dt_limit") or (0.0, float("inf"))
    steps = torch.nn.functional.softplus(steps).clamp(low, high).float()
    tensors = {
        "q": queries,
        "k": keys,
        "v": (x.float() * steps[..., None]).to(x.dtype),
        "g": steps * given["A"].float(),
    }
    if given.get("initial_states") is not None:
        tensors["initial_state"] = given["initial_states"].transpose(-1, -2).float()
    o, state = swap.call(**tensors)
    if given.get("D") is not None:
        o = (o.float() + given["D"].float()[..., None] * x.float()).to(x.dtype)
    return (o, state.transpose(-1, -2)) if final else o


FILTERED = {"weight", "bias", "activation"}
FILTER_EXTRAS = ("seq_idx", "initial_states", "return_final_states", "final_states_out", "initial_state", "residual")
"""Arguments of other libraries' causal filters that the kernel does not take."""


def _short_convolution(
    swap: Swap, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A call in the convention of transformers and causal-conv1d: (x [B, D, T], weight [D, W], ...) -> [B, D, T]."""
    given, extras = _given(signature, args, kwargs)
    x = given.pop(next(iter(signature.parameters)))
    for name, value in {**given, **{n: extras.get(n) for n in FILTER_EXTRAS}}.items():
        if name not in FILTERED and value is not None and value is not False:
            raise Uncovered(f"argument {name}")
    weight, bias, activation = given["weight"], given.get("bias"), given.get("activation")
    if ("none" if activation is None else {"swish": "silu"}.get(activation, activation)) != swap.spec["activation"]:
        raise Uncovered(f"activation {activation} where the kernel has {swap.spec['activation']}")
    if weight.shape[-1] != swap.spec["width"] or (bias is not None) != swap.spec["bias"]:
        raise Uncovered("another number of taps, or a bias where the kernel has none")
    _covered(*(t for t in (x, weight, bias) if t is not None))
    tensors = {"x": x.transpose(1, 2), "weight": weight}
    if bias is not None:
        tensors["bias"] = bias
    return swap.call(**tensors)[0].transpose(1, 2)


def _rotary(
    swap: Swap, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | tuple[Tensor, ...]:
    """A call in the convention of transformers: (q, k, cos, sin, unsqueeze_dim) or (x, cos, sin, unsqueeze_dim)."""
    given, extras = _given(signature, args, kwargs)
    names = list(signature.parameters)
    axis = given.get("unsqueeze_dim", 1)
    heads = [given.pop(n) for n in (names[0], "k") if n in given]
    cos, sin = given.pop("cos"), given.pop("sin")
    others = {n for n, v in (given | extras).items() if v is not None and n != "unsqueeze_dim"}
    if others or axis not in (1, 2) or len(heads) != 1 + swap.spec["keys"]:
        raise Uncovered(f"arguments {', '.join(sorted(others)) or 'of another convention'}")
    if not all(isinstance(t, Tensor) and t.ndim == 4 for t in heads) or cos.ndim != 3 or cos.shape != sin.shape:
        raise Uncovered("shapes of another convention")
    _covered(*heads, cos, sin)
    if cos.requires_grad or sin.requires_grad:
        raise Uncovered("angles that are trained")
    # tokens before heads, as projections write them: there is nothing to copy
    rows = [t.transpose(1, 2) if axis == 1 else t for t in heads]
    size, turned = rows[0].shape[-1], cos.shape[-1] * (2 if swap.spec["angles"] == "half" else 1)
    same = all(t.shape[:2] == rows[0].shape[:2] and t.shape[-1] == size for t in rows)
    if not same or turned % 2 or turned > size or cos.shape[1] != rows[0].shape[1]:
        raise Uncovered("sizes of heads and angles differ")
    if cos.shape[0] not in (1, rows[0].shape[0]):
        raise Uncovered("angles of another batch")
    found = swap.call(cos=cos, sin=sin, **dict(zip(("q", "k"), rows, strict=False)))
    turned_heads = tuple(t.transpose(1, 2) if axis == 1 else t for t in found)
    return turned_heads if swap.spec["keys"] else turned_heads[0]


CALLS: dict[str, Callable[..., Any]] = {
    "rotary": _rotary,
    "linear_attention": _linear_attention,
    "state_space": _state_space,
    "short_convolution": _short_convolution,
}
"""Hooks on a function of the model's Python module -> how its calls are served."""
