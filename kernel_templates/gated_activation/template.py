"""Gated activations, forward and backward: y = act(gate) * (up + offset), both clamped by a limit where there is one.

Tensors are rows of WIDTH values (leading dims flattened); gate and up come as two tensors, as halves of one, or as its
alternating columns. A program handles a tile of rows and columns; every element is read once and backward recomputes
the activation instead of storing it. All arithmetic is fp32, row offsets are int64.

Legend: N rows, WIDTH values a row; suffix _RC is a tile [ROWS, BLOCK], _R one value a row, _C one a column.
"""

import torch
import triton
import triton.language as tl

from kernel_templates.tl_ops import activation, activation_and_slope


@triton.jit
def _tile(N, WIDTH, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows, first column and columns of this program's tile; columns run fastest."""
    tiles = tl.cdiv(WIDTH, BLOCK)
    row_R = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (tl.program_id(0) % tiles) * BLOCK
    return row_R, start, start + tl.arange(0, BLOCK)


@triton.jit
def _load_pair(gate_ptr, up_ptr, row_R, start, N, WIDTH, LAYOUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up of a tile in fp32; ``gate_ptr`` holds both unless they are separate."""
    col_C = start + tl.arange(0, BLOCK)
    inside_RC = (row_R < N)[:, None] & (col_C < WIDTH)[None, :]
    if LAYOUT == "separate":
        at_RC = row_R[:, None] * WIDTH + col_C[None, :]
        gate_RC = tl.load(gate_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        up_RC = tl.load(up_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    elif LAYOUT == "concatenated":
        at_RC = row_R[:, None] * (2 * WIDTH) + col_C[None, :]
        gate_RC = tl.load(gate_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        up_RC = tl.load(gate_ptr + at_RC + WIDTH, mask=inside_RC, other=0.0).to(tl.float32)
    else:
        # one contiguous load of both, parted in registers
        both_C = 2 * start + tl.arange(0, 2 * BLOCK)
        at_RC = row_R[:, None] * (2 * WIDTH) + both_C[None, :]
        both_RC = tl.load(gate_ptr + at_RC, mask=(row_R < N)[:, None] & (both_C < 2 * WIDTH)[None, :], other=0.0)
        gate_RC, up_RC = tl.split(tl.reshape(both_RC.to(tl.float32), (ROWS, BLOCK, 2)))
    return gate_RC, up_RC


@triton.jit
def _store_pair(
    gate_ptr,
    up_ptr,
    gate_RC,
    up_RC,
    row_R,
    start,
    N,
    WIDTH,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inverse of :func:`_load_pair`."""
    col_C = start + tl.arange(0, BLOCK)
    inside_RC = (row_R < N)[:, None] & (col_C < WIDTH)[None, :]
    kind: tl.constexpr = gate_ptr.dtype.element_ty
    if LAYOUT == "separate":
        at_RC = row_R[:, None] * WIDTH + col_C[None, :]
        tl.store(gate_ptr + at_RC, gate_RC.to(kind), mask=inside_RC)
        tl.store(up_ptr + at_RC, up_RC.to(up_ptr.dtype.element_ty), mask=inside_RC)
    elif LAYOUT == "concatenated":
        at_RC = row_R[:, None] * (2 * WIDTH) + col_C[None, :]
        tl.store(gate_ptr + at_RC, gate_RC.to(kind), mask=inside_RC)
        tl.store(gate_ptr + at_RC + WIDTH, up_RC.to(kind), mask=inside_RC)
    else:
        both_C = 2 * start + tl.arange(0, 2 * BLOCK)
        at_RC = row_R[:, None] * (2 * WIDTH) + both_C[None, :]
        both_RC = tl.reshape(tl.join(gate_RC, up_RC), (ROWS, 2 * BLOCK)).to(kind)
        tl.store(gate_ptr + at_RC, both_RC, mask=(row_R < N)[:, None] & (both_C < 2 * WIDTH)[None, :])


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    N,
    WIDTH,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_R, start, col_C = _tile(N, WIDTH, ROWS, BLOCK)
    gate_RC, up_RC = _load_pair(gate_ptr, up_ptr, row_R, start, N, WIDTH, LAYOUT, ROWS, BLOCK)
    if LIMIT is not None:
        gate_RC = tl.where(gate_RC > LIMIT, LIMIT, gate_RC)
        up_RC = tl.where(up_RC > LIMIT, LIMIT, tl.where(up_RC < -LIMIT, -LIMIT, up_RC))
    y_RC = activation(gate_RC, ACTIVATION, ALPHA) * (up_RC + UP_OFFSET)
    at_RC = row_R[:, None] * WIDTH + col_C[None, :]
    tl.store(y_ptr + at_RC, y_RC.to(y_ptr.dtype.element_ty), mask=(row_R < N)[:, None] & (col_C < WIDTH)[None, :])


@triton.jit
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    N,
    WIDTH,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_R, start, col_C = _tile(N, WIDTH, ROWS, BLOCK)
    at_RC = row_R[:, None] * WIDTH + col_C[None, :]
    dy_RC = tl.load(dy_ptr + at_RC, mask=(row_R < N)[:, None] & (col_C < WIDTH)[None, :], other=0.0).to(tl.float32)
    gate_RC, up_RC = _load_pair(gate_ptr, up_ptr, row_R, start, N, WIDTH, LAYOUT, ROWS, BLOCK)
    if LIMIT is not None:
        # a clamped value gets no gradient; one exactly at the limit does, as torch has it
        gate_free_RC = gate_RC <= LIMIT
        up_free_RC = (up_RC <= LIMIT) & (up_RC >= -LIMIT)
        gate_RC = tl.where(gate_RC > LIMIT, LIMIT, gate_RC)
        up_RC = tl.where(up_RC > LIMIT, LIMIT, tl.where(up_RC < -LIMIT, -LIMIT, up_RC))
    value_RC, slope_RC = activation_and_slope(gate_RC, ACTIVATION, ALPHA)
    dgate_RC = dy_RC * slope_RC * (up_RC + UP_OFFSET)
    dup_RC = dy_RC * value_RC
    if LIMIT is not None:
        dgate_RC = tl.where(gate_free_RC, dgate_RC, 0.0)
        dup_RC = tl.where(up_free_RC, dup_RC, 0.0)
    _store_pair(dgate_ptr, dup_ptr, dgate_RC, dup_RC, row_R, start, N, WIDTH, LAYOUT, ROWS, BLOCK)


def bucket(tensors, spec):
    """Configurations depend on the width only."""
    if spec.layout == "separate":
        return {"width": tensors["gate"].shape[-1]}
    return {"width": tensors["gate_up"].shape[-1] // 2}


def outputs_like(tensors, spec, config):
    """Empty y [..., I]; nothing is saved."""
    if spec.layout == "separate":
        return {"y": torch.empty_like(tensors["gate"])}, {}
    gate_up = tensors["gate_up"]
    return {"y": gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))}, {}


def tiling(width, rows, config):
    """Block of columns and number of programs."""
    block = min(config["block"], 1 << (width - 1).bit_length())
    return block, -(-rows // config["rows"]) * -(-width // block)


def forward(tensors, spec, config):
    """y; nothing is saved."""
    outputs, saved = outputs_like(tensors, spec, config)
    y = outputs["y"]
    if y.numel() > 0:
        width = y.shape[-1]
        rows = y.numel() // width
        block, programs = tiling(width, rows, config)
        _forward_kernel[(programs,)](
            tensors["gate"] if spec.layout == "separate" else tensors["gate_up"],
            tensors["up"] if spec.layout == "separate" else None,
            y,
            rows,
            width,
            ACTIVATION=spec.activation,
            ALPHA=spec.alpha,
            LIMIT=spec.limit,
            UP_OFFSET=spec.up_offset,
            LAYOUT=spec.layout,
            ROWS=config["rows"],
            BLOCK=block,
            num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of gate and up, or of both in one tensor, in their layout."""
    dy = grads["y"]
    if spec.layout == "separate":
        gradients = {"gate": torch.empty_like(tensors["gate"]), "up": torch.empty_like(tensors["up"])}
    else:
        gradients = {"gate_up": torch.empty_like(tensors["gate_up"])}
    if dy.numel() > 0:
        width = dy.shape[-1]
        rows = dy.numel() // width
        block, programs = tiling(width, rows, config)
        _backward_kernel[(programs,)](
            dy,
            tensors["gate"] if spec.layout == "separate" else tensors["gate_up"],
            tensors["up"] if spec.layout == "separate" else None,
            gradients["gate"] if spec.layout == "separate" else gradients["gate_up"],
            gradients["up"] if spec.layout == "separate" else None,
            rows,
            width,
            ACTIVATION=spec.activation,
            ALPHA=spec.alpha,
            LIMIT=spec.limit,
            UP_OFFSET=spec.up_offset,
            LAYOUT=spec.layout,
            ROWS=config["rows"],
            BLOCK=block,
            num_warps=config["num_warps"],
        )
    return {name: gradients[name] for name in needs}
