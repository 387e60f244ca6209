"""bf16 in the interpreter, bit for bit against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_templates import interpreter

pytestmark = pytest.mark.skipif(not interpreter.is_active(), reason="kernels are compiled here")

BF16 = torch.bfloat16


@triton.jit
def _binary_kernel(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "maximum":
        r = tl.maximum(a, b)
    elif OP == "fma":
        r = tl.fma(a, b, a)
    elif OP == "where":
        r = tl.where(a > b, a, b * 0.5)
    elif OP == "abs":
        r = tl.abs(a)
    tl.store(out + i, r)


@triton.jit
def _convert_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def _dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    acc = tl.full((M, N), 1.0, tl.float32)
    acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def _reduce_kernel(x, total, largest, running, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    t = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(total + m, tl.sum(t, axis=1))
    tl.store(largest + m, tl.max(t, axis=1))
    tl.store(running + m[:, None] * N + n[None, :], tl.cumsum(t, axis=1))


@triton.jit
def _atomic_kernel(out, x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out + i % 4, tl.load(x + i), mask=i != 3)


@triton.jit
def _constant_kernel(out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.full((N,), 1.00390625, tl.bfloat16) + tl.zeros((N,), tl.bfloat16))


def _all_bf16(seed: int, n: int) -> Tensor:
    """Random bit patterns without NaN: every magnitude, subnormals and infinities too."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**16, n, dtype=np.uint16)
    values = torch.from_numpy(bits.view(np.int16)).view(BF16)
    return torch.where(values.isnan(), torch.ones((), dtype=BF16), values)


def _same(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit; NaNs only have to meet NaNs."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    assert torch.equal(actual[~nan].view(kind), expected[~nan].view(kind))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("div", lambda a, b: (a.float() / b.float()).to(BF16)),
        ("maximum", torch.maximum),
        ("fma", lambda a, b: (a.double() * b.double() + a.double()).to(BF16)),
        ("where", lambda a, b: torch.where(a > b, a, (b * 0.5))),
        ("abs", lambda a, b: a.abs()),
    ],
)
def test_arithmetic(op, expected):
    x, y = _all_bf16(1, 4096), _all_bf16(2, 4096)
    if op == "fma":  # products that fp32 holds exactly
        x, y = torch.randn(4096).to(BF16), torch.randn(4096).to(BF16)
    out = torch.empty(4096, dtype=BF16)
    _binary_kernel[(1,)](x, y, out, op, 4096)
    if op == "fma":
        assert (out.double() - expected(x, y).double()).abs().max() <= 2**-8 * expected(x, y).abs().max()
        exact = (x.float() * y.float() + x.float()).to(BF16)
        _same(out, exact)
    else:
        _same(out, expected(x, y))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, BF16])
@pytest.mark.parametrize("target", [BF16, torch.float32, torch.float16])
def test_conversion(source, target):
    if source.is_floating_point:
        x = torch.from_numpy(np.random.default_rng(3).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32))
        x = torch.where(x.isnan(), torch.zeros(()), x).to(source)
    else:
        x = torch.randint(-(2**30), 2**30, (4096,), dtype=source)
    out = torch.empty(4096, dtype=target)
    _convert_kernel[(1,)](x, out, 4096)
    _same(out, x.to(target))


def test_ties_go_to_even():
    one = 0x3F800000
    bits = np.array([one | 0x8000, one | 0x18000, one | 0x8001, 0x7F7FFFFF], np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy())
    out = torch.empty(4, dtype=BF16)
    _convert_kernel[(1,)](x, out, 4)
    assert out.tolist() == [1.0, 1.015625, 1.0078125, float("inf")]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_dot_accumulates_in_fp32(dtype):
    # small integers: every partial sum is exact in fp32 and not in bf16 or fp16
    a = torch.randint(-128, 128, (16, 64)).to(dtype)
    b = torch.randint(-128, 128, (64, 32)).to(dtype)
    c = torch.empty(16, 32)
    _dot_kernel[(1,)](a, b, c, 16, 32, 64)
    assert torch.equal(c, a.float() @ b.float() + 1)


def test_reductions():
    x = torch.randint(-64, 64, (8, 128)).to(BF16)
    total, largest, running = torch.empty(8, dtype=BF16), torch.empty(8, dtype=BF16), torch.empty_like(x)
    _reduce_kernel[(1,)](x, total, largest, running, 8, 128)
    assert torch.equal(total, x.sum(1))
    assert torch.equal(largest, x.amax(1))
    assert torch.equal(running, x.float().cumsum(1).to(BF16))


def test_atomic_add_visits_every_lane():
    x = torch.tensor([1.0, 2.0, 3.0, 99.0, 5.0, 6.0, 7.0, 8.0], dtype=BF16)
    out = torch.ones(4, dtype=BF16)
    _atomic_kernel[(1,)](out, x, 8)
    assert out.tolist() == [7.0, 9.0, 11.0, 9.0]


def test_constants():
    out = torch.empty(4, dtype=BF16)
    _constant_kernel[(1,)](out, 4)
    assert out.tolist() == [1.0] * 4  # 1 + 2^-8 is a tie


def test_strict_refuses_products_that_a_gpu_refuses():
    a, b, c = torch.randn(4, 64), torch.randn(64, 32), torch.empty(4, 32)
    _dot_kernel[(1,)](a, b, c, 4, 32, 64)
    interpreter.activate(strict=True)
    try:
        with pytest.raises(Exception, match="M = 4 must be a power of two, at least 16"):
            _dot_kernel[(1,)](a, b, c, 4, 32, 64)
    finally:
        interpreter.activate(strict=False)


def test_a_remembered_type_is_its_own():
    """Types of one shape and name are built once; what makes each different stays."""
    near, far = (tl.block_type(tl.pointer_type(tl.float32, space), [2, 4]) for space in (1, 3))
    assert (near.element_ty.address_space, far.element_ty.address_space) == (1, 3)
    assert near.shape == far.shape == tl.block_type(tl.int32, [tl.constexpr(2), 4]).shape
    assert near != far
    flat, turned = tl.block_type(tl.float32, [8]), tl.block_type(tl.float32, [4, 2])
    assert [int(s) for s in flat.shape] == [8]
    assert [int(s) for s in turned.shape] == [4, 2]
    assert flat.numel == turned.numel == near.numel == 8
    assert "fp32" in turned.name
    assert turned.name != near.name


@triton.jit
def _shapes_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(x + at)
    wide = tl.trans(tl.reshape(tile, (tile.shape[1], tile.shape[0])))
    tl.store(out + at, (wide * tile.shape[0]).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, BF16])
def test_shapes_of_remembered_types(dtype):
    for rows, columns in ((2, 8), (8, 2), (4, 4), (2, 8)):
        x = torch.arange(16).to(dtype).reshape(rows, columns)
        out = torch.empty_like(x)
        _shapes_kernel[(1,)](x, out, ROWS=rows, COLUMNS=columns)
        assert torch.equal(out, x.reshape(columns, rows).T * rows)
