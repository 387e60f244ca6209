"""Makes Triton's interpreter right for bf16, so that kernels can be proven on CPU tensors.

The interpreter of stock Triton (3.6 to 3.9) keeps bf16 values as their bits in uint16 arrays and then computes with
these integers: ``tl.dot`` multiplies bit patterns, sums are garbage, conversions from fp32 truncate. ``activate()``
turns interpretation on and replaces the faulty operations: bf16 operands are widened to fp32 (exact), the operation
is done in fp32, and a bf16 result is rounded to nearest, ties to even. For + - * / and sqrt that equals one rounding
of the exact result, because fp32 has more than twice the significant bits of bf16.

``tl.dot`` accumulates in fp32 whatever its operands are. A sum of a bf16 tile accumulates in fp32 and is rounded
once, as torch does it; a GPU may round every partial sum, so convert to fp32 before summing.

The interpreter accepts what a GPU refuses. ``activate(strict=True)`` refuses matrix products that are too small or
not powers of two. It never sees races, shared-memory limits or register pressure: an interpreted result is a proof
of the algorithm, not of the machine code.

Self-contained (torch, triton, numpy): bundles carry a copy of this file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_DOT = (16, 16, 16)
"""Smallest M, N and K of a matrix product that every supported GPU compiles."""

_strict = False
_active = False


def activate(*, strict: bool | None = None) -> None:
    """Interpret every Triton kernel that is defined from now on, with bf16 done right. May be called repeatedly.

    Call it before the module that holds the kernels is imported: ``triton.jit`` decides when it decorates.

    Args:
        strict: refuse ``tl.dot`` shapes that a GPU refuses (every dim a power of two and at least 16); None keeps
            the current setting, which starts as False.
    """
    global _active, _strict
    if strict is not None:
        _strict = strict
    if _active:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as stock

    # every kernel package of a bundle carries a copy of this file: the first one patches for all
    if not getattr(stock, "patched_by_onboard", False):
        _interpret_standard_library(stock)
        _patch_builder(stock)
        _patch_reductions(stock)
        _patch_execution(stock)
        _remember_types(stock)
        stock.patched_by_onboard = True
    _active = True


def is_active() -> bool:
    """Whether this process interprets Triton kernels."""
    return _active


# ---- bf16 <-> fp32 -----------------------------------------------------------------------------------------------


def bf16_to_fp32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The fp32 values of bf16 bit patterns, any shape; exact."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(values: NDArray[Any], toward_zero: bool = False) -> NDArray[np.uint16]:
    """The bf16 bit patterns nearest to fp32 values, ties to even (or truncated), any shape.

    Overflow goes to infinity, subnormals are kept, every NaN becomes a quiet one.
    """
    single = np.asarray(values).astype(np.float32)
    bits = np.atleast_1d(single).view(np.uint32).reshape(single.shape)
    if toward_zero:
        kept = bits >> np.uint32(16)
    else:
        # adding 0x7fff, and one more where the last kept bit is odd, carries exactly when rounding up is due
        kept = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint32(0x7FC0), kept).astype(np.uint16)


def _is_bf16(handle: Any) -> bool:
    """Whether ``handle`` is a TensorHandle of bf16 bits (not a pointer to bf16, not a comparison's result)."""
    if not hasattr(handle, "data") or not hasattr(handle, "dtype"):
        return False
    return getattr(handle.dtype.scalar, "name", "") == "bf16" and handle.data.dtype == np.uint16


# ---- the standard library ----------------------------------------------------------------------------------------


def _interpret_standard_library(stock: Any) -> None:
    """Turn ``tl.sum`` and the like into interpreted functions if triton was imported before interpretation."""
    from triton.language import core
    from triton.runtime.jit import JITFunction

    converted: dict[int, Any] = {}
    modules = [m for name, m in sys.modules.items() if name.split(".")[:2] == ["triton", "language"] and m]
    for owner in [*modules, core.tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                if id(value) not in converted:
                    converted[id(value)] = stock.InterpretedFunction(value.fn)
                setattr(owner, name, converted[id(value)])


# ---- element by element ------------------------------------------------------------------------------------------


def _patch_builder(stock: Any) -> None:
    """Arithmetic, conversions, products and memory operations of the interpreter's builder."""
    import triton.language as tl

    handle_type = stock.TensorHandle
    builder = stock.InterpreterBuilder
    # every + - * of integers would be done again in int64 for a device_assert that the interpreter never fires
    shared = stock.interpreter_builder
    shared.options = dataclasses.replace(shared.options, sanitize_overflow=False)

    def widened(handle: Any) -> Any:
        return handle_type(bf16_to_fp32(handle.data), tl.float32) if _is_bf16(handle) else handle

    def in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` on fp32 copies of its bf16 operands; the result has the dtype of the last operand."""

        @functools.wraps(method)
        def wrapped(self: Any, *args: Any) -> Any:
            if not any(map(_is_bf16, args)):
                return method(self, *args)
            operands = [a for a in args if isinstance(a, handle_type)]
            out = method(self, *map(widened, args))
            if out.data.dtype == np.bool_:
                return handle_type(out.data, tl.int1)
            if _is_bf16(operands[-1]):
                return handle_type(fp32_to_bf16(out.data), tl.bfloat16)
            return out

        return wrapped

    for name in ("binary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt"):
        setattr(builder, name, in_fp32(getattr(builder, name)))

    stock_ternary = in_fp32(builder.ternary_op)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where:  # a choice between bits: nothing to compute
            return handle_type(np.where(lhs.data, rhs.data, other.data), other.dtype.scalar)
        return stock_ternary(self, lhs, rhs, other, op)

    builder.ternary_op = ternary_op

    # ---- conversions

    def convert(src: Any, dst_type: Any, toward_zero: bool = False) -> Any:
        target = dst_type.scalar
        values = bf16_to_fp32(src.data) if _is_bf16(src) else src.data
        if target.name == "bf16":
            if _is_bf16(src):
                return handle_type(src.data, target)
            return handle_type(fp32_to_bf16(values, toward_zero), target)
        data = values.astype(stock._get_np_dtype(target))
        if toward_zero and target.is_floating():
            away = np.abs(data.astype(np.float64)) > np.abs(values.astype(np.float64))
            data = np.where(away, np.nextafter(data, np.zeros_like(data)), data)
        return handle_type(data, target)

    def is_fp8(dtype: Any) -> bool:
        return bool(dtype.scalar.is_fp8()) if hasattr(dtype.scalar, "is_fp8") else False

    stock_cast, stock_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if is_fp8(src.dtype) or is_fp8(dst_type):
            return stock_cast(self, src, dst_type)
        return convert(src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if is_fp8(src.dtype) or is_fp8(dst_type):
            return stock_fp_to_fp(self, src, dst_type, rounding_mode)
        return convert(src, dst_type, toward_zero=rounding_mode == stock._ir.ROUNDING_MODE.RTZ)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = lambda self, value: handle_type(fp32_to_bf16(np.array([value])), tl.bfloat16)

    # ---- products

    stock_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if _strict:
            _check_dot(a.data.shape, b.data.shape)
        if is_fp8(a.dtype) or is_fp8(b.dtype) or not a.dtype.scalar.is_floating():
            return stock_dot(self, a, b, d, *options)
        wide = np.float64 if d.data.dtype == np.float64 else np.float32
        product = np.matmul(widened(a).data.astype(wide), widened(b).data.astype(wide))
        total = product + widened(d).data.astype(wide)
        if d.dtype.scalar.name == "bf16":
            return handle_type(fp32_to_bf16(total), d.dtype.scalar)
        return handle_type(total.astype(d.data.dtype), d.dtype.scalar)

    builder.create_dot = create_dot

    # ---- atomics

    stock_rmw = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *options: Any) -> Any:
        if not _is_bf16(val) or op != stock._ir.ATOMIC_OP.FADD:
            return stock_rmw(self, op, ptr, val, mask, *options)
        old = np.zeros(val.data.shape, np.uint16)
        pointers = np.broadcast_to(ptr.data, val.data.shape)
        wanted = np.broadcast_to(mask.data, val.data.shape)
        one = np.ones(1, bool)
        # in order, one at a time: two lanes may hold the same address
        for index in zip(*np.nonzero(wanted), strict=True):
            address = np.array([pointers[index]], np.uint64)
            before = stock._interpreter.load(address, one, np.zeros(1, np.uint16), np.dtype(np.uint16))
            old[index] = before[0]
            after = fp32_to_bf16(bf16_to_fp32(before) + bf16_to_fp32(val.data[index]))
            stock._interpreter.store(address, after.reshape(1), one)
        return handle_type(old, val.dtype.scalar)

    builder.create_atomic_rmw = create_atomic_rmw


def _check_dot(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    """Refuse a product that a GPU would refuse.

    Raises:
        ValueError: a dim is not a power of two, or too small.
    """
    sizes = (a_shape[-2], b_shape[-1], a_shape[-1])
    for label, size, least in zip("MNK", sizes, MIN_DOT, strict=True):
        if size & (size - 1) or size < least:
            raise ValueError(
                f"tl.dot of {a_shape} and {b_shape}: {label} = {size} must be a power of two, at least {least}"
            )


# ---- reductions --------------------------------------------------------------------------------------------------


def _patch_reductions(stock: Any) -> None:
    """Sums, extrema and scans of bf16 tiles: accumulated in fp32, rounded once."""
    import triton.language as tl

    def as_fp32(tensor: Any) -> Any:
        data = bf16_to_fp32(tensor.handle.data)
        kind = tl.block_type(tl.float32, list(data.shape)) if data.shape else tl.float32
        return tl.core.tensor(stock.TensorHandle(data, tl.float32), kind)

    def as_bf16(tensor: Any) -> Any:
        if not isinstance(tensor, tl.core.tensor) or tensor.dtype != tl.float32:
            return tensor
        data = fp32_to_bf16(tensor.handle.data)
        kind = tl.block_type(tl.bfloat16, list(tensor.shape)) if tensor.type.is_block() else tl.bfloat16
        return tl.core.tensor(stock.TensorHandle(data, tl.bfloat16), kind)

    def in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            first = tensor[0] if isinstance(tensor, tuple) else tensor
            if not _is_bf16(first.handle):
                return method(self, tensor, *args, **kwargs)
            out = method(self, as_fp32(first), *args, **kwargs)
            if isinstance(out, (tuple, list)):
                return type(out)(map(as_bf16, out))
            return as_bf16(out)

        return wrapped

    for owner, names in ((stock.ReduceOps, ("sum", "min_max")), (stock.ScanOps, ("cumsum", "cumprod"))):
        for name in names:
            setattr(owner, name, in_fp32(getattr(owner, name)))


# ---- running -----------------------------------------------------------------------------------------------------


def _patch_execution(stock: Any) -> None:
    """No warnings for what a GPU does silently (inf - inf in a masked lane), and cheaper calls of helpers.

    At every call of a device function, stock patches by reflection the ``triton.language`` modules that the function
    sees. Here that is done once: a launch patches its kernel's modules and restores them at its end; what a helper's
    first call patches beyond them (``triton.language.core``, for ``tl.sum``) stock never restores.
    """
    import triton.language as tl

    executor, function = stock.GridExecutor, stock.InterpretedFunction
    stock_launch, stock_call = executor.__call__, function.__call__
    of_running_kernel: frozenset[str] = frozenset()
    for_good: frozenset[str] = frozenset()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        seen = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
        return frozenset(module.__name__ for module in seen)

    @functools.wraps(stock_launch)
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal of_running_kernel
        before, of_running_kernel = of_running_kernel, languages(self.fn)
        try:
            with np.errstate(all="ignore"):
                return stock_launch(self, *args, **kwargs)
        finally:
            of_running_kernel = before

    @functools.wraps(stock_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal for_good
        missing = languages(self.fn) - of_running_kernel - for_good
        if missing or not of_running_kernel:
            for_good |= missing if of_running_kernel else frozenset()
            return stock_call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except stock.InterpreterError:
            raise
        except Exception as problem:
            raise stock.InterpreterError(repr(problem)) from problem

    stock_patch_tensor = stock._patch_lang_tensor

    @functools.wraps(stock_patch_tensor)
    def patch_tensor(tensor: Any, scope: Any) -> None:
        stock_patch_tensor(tensor, scope)
        # a scalar is an array of one element, which int() of recent numpy refuses: needed by range() with loaded bounds
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    stock._patch_lang_tensor = patch_tensor
    executor.__call__ = launch
    function.__call__ = call


# ---- types -------------------------------------------------------------------------------------------------------


def _remember_types(stock: Any) -> None:
    """Shapes and types are worked out once a kind, not once a value: a third of an interpreted kernel's time.

    Every operation makes a value whose type stock builds anew, with its name as text. What an object holds beyond
    its own value depends on the type alone: it is copied from the first object of that type.
    """
    import triton.language as tl

    core = tl.core
    stock_block, stock_tensor, stock_numpy = core.block_type.__init__, core.tensor.__init__, stock._get_np_dtype
    stock_tuple_type = core._type_for_tuple_values
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    numpys: dict[str, Any] = {}
    tuples: dict[Any, Any] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[s.value if isinstance(s, core.constexpr) else s for s in shape])
        facts = blocks.get(key)
        if facts is None:
            stock_block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            return
        self.__dict__.update(facts)
        self.element_ty = element_ty

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        facts = tensors.get(type.name)
        if facts is None:
            stock_tensor(self, handle, type)
            tensors[type.name] = {n: v for n, v in vars(self).items() if n not in ("handle", "type", "dtype")}
            return
        self.__dict__.update(facts)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def numpy_dtype(dtype: Any) -> Any:
        found = numpys.get(dtype.name)
        if found is None:
            found = numpys[dtype.name] = stock_numpy(dtype)
        return found

    def tuple_type(values: Any, *fields: Any) -> Any:
        """Of a shape: a tuple of constant integers without names; any other tuple as stock has it."""
        if fields or not all(type(v) is core.constexpr and type(v.value) is int for v in values):
            return stock_tuple_type(values, *fields)
        key = tuple([v.value for v in values])
        if key not in tuples:
            tuples[key] = stock_tuple_type(values)
        return tuples[key]

    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init
    core._type_for_tuple_values = tuple_type
    stock._get_np_dtype = numpy_dtype
