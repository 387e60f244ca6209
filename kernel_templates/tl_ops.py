"""Triton helpers that several families share; the specialiser copies those that a candidate uses into it."""

import triton
import triton.language as tl


@triton.jit
def activation(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """act(x) in fp32, any shape; comparisons are written so that NaN passes through."""
    if ACTIVATION == "silu":
        value = x * tl.sigmoid(ALPHA * x)
    elif ACTIVATION == "gelu":
        value = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        value = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(x)
    elif ACTIVATION == "relu":
        value = tl.where(x <= 0, 0.0, x)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(x <= 0, 0.0, x)
        value = positive * positive
    return value


@triton.jit
def activation_and_slope(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """act(x) and its derivative in fp32, any shape; the slope of relu at 0 is 0, as torch has it."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(ALPHA * x)
        value = x * sigmoid
        slope = sigmoid + ALPHA * value * (1.0 - sigmoid)
    elif ACTIVATION == "gelu":
        # the normal distribution and, for the slope, its density
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        sigmoid = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(x)
        slope = value * (1.0 - value)
    elif ACTIVATION == "relu":
        value = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(x <= 0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope
