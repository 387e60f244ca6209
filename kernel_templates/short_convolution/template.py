"""Short causal convolution along the sequence, one filter a channel: forward and backward, states, packed sequences.

Tensors are rows [N, D]: the tokens of all sequences one after the other, channels last, as linear attention and
Mamba hold them. A program takes a tile of rows and channels and reads it once for each tap, shifted by one row: all but
the first read come from the cache. All arithmetic is fp32. Backward computes the gradient before the activation
again for each tap, which costs arithmetic and saves writing it down; it walks tiles with a fixed stride and keeps its
share of the weights' gradient in registers, so two runs are bitwise equal.

Legend: R rows of a tile, D channels of a tile, W taps. Rows are counted from the tile's first, so that offsets in a
tile are 32 bits wide. A row's *first* is the first row of its sequence, its *end* one past the last. The W - 1 slots
of a state, oldest first, are the rows before ``first`` (initial) or before ``end`` (final).
"""

import torch
import triton
import triton.language as tl

from kernel_templates.tl_ops import activation, activation_and_slope


@triton.jit
def sequence_of(start, row_R, inside_R, sequences, cu_seqlens, length, PACKED: tl.constexpr):
    """Number (int64), first row and end of the sequence that each row of the tile at ``start`` (int64) belongs to."""
    if PACKED:
        sequence_R = tl.load(sequences + start + row_R, mask=inside_R, other=0)
        first_R = tl.load(cu_seqlens + sequence_R, mask=inside_R, other=0)
        end_R = tl.load(cu_seqlens + sequence_R + 1, mask=inside_R, other=0)
    else:
        sequence_R = (start + row_R) // length
        first_R = sequence_R * length
        end_R = first_R + length
    return sequence_R, (first_R - start).to(tl.int32), (end_R - start).to(tl.int32)


@triton.jit
def bounds_of(sequence, cu_seqlens, length, PACKED: tl.constexpr):
    """First row and length (both int64) of one sequence."""
    if PACKED:
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        count = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - first
    else:
        first = sequence * length
        count = sequence * 0 + length
    return first, count


@triton.jit
def tap(x, state, row_R, sequence_R, first_R, inside_R, col_D, D, W: tl.constexpr, STATE: tl.constexpr):
    """Inputs [R, D] at rows that may lie up to W - 1 before their sequence; zeros where there is nothing."""
    inside_D = col_D < D
    own_RD = (inside_R & (row_R >= first_R))[:, None] & inside_D[None, :]
    value_RD = tl.load(x + row_R[:, None] * D + col_D[None, :], mask=own_RD, other=0.0).to(tl.float32)
    if STATE:
        slot_R = row_R - first_R + (W - 1)
        before_RD = (inside_R & (row_R < first_R))[:, None] & inside_D[None, :]
        at_RD = (sequence_R[:, None] * D + col_D[None, :]) * (W - 1) + slot_R[:, None]
        value_RD += tl.load(state + at_RD, mask=before_RD, other=0.0).to(tl.float32)
    return value_RD


@triton.jit
def before_activation(
    x, weight, bias, state, row_R, sequence_R, first_R, inside_R, col_D, D,
    W: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The filtered rows [R, D] in fp32."""
    sum_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for w in tl.static_range(W):
        weight_D = tl.load(weight + col_D * W + w, mask=col_D < D, other=0.0).to(tl.float32)
        sum_RD += weight_D[None, :] * tap(
            x, state, row_R - (W - 1) + w, sequence_R, first_R, inside_R, col_D, D, W=W, STATE=STATE
        )
    if BIAS:
        sum_RD += tl.load(bias + col_D, mask=col_D < D, other=0.0).to(tl.float32)[None, :]
    return sum_RD


@triton.jit
def forward_kernel(
    x, weight, bias, state, y, sequences, cu_seqlens, rows, length, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    row_R = tl.arange(0, ROWS)
    col_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_R = row_R < rows - start
    sequence_R, first_R, _end_R = sequence_of(start, row_R, inside_R, sequences, cu_seqlens, length, PACKED=PACKED)
    y_RD = before_activation(
        x + start * D, weight, bias, state, row_R, sequence_R, first_R, inside_R, col_D, D,
        W=W, BIAS=BIAS, STATE=STATE, ROWS=ROWS, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    if ACTIVATION != "none":
        y_RD = activation(y_RD, ACTIVATION=ACTIVATION, ALPHA=1.0)
    inside_RD = inside_R[:, None] & (col_D < D)[None, :]
    tl.store(y + start * D + row_R[:, None] * D + col_D[None, :], y_RD.to(y.dtype.element_ty), mask=inside_RD)


@triton.jit
def final_state_kernel(
    x, state, final_state, cu_seqlens, length, D,
    W: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs of each sequence; those of the initial state where it is shorter."""
    sequence = tl.program_id(0).to(tl.int64)
    col_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, count = bounds_of(sequence, cu_seqlens, length, PACKED=PACKED)
    # rows are counted from the oldest slot
    start = first + count - (W - 1)
    slot_R = tl.arange(0, SLOTS)
    inside_R = slot_R < W - 1
    zero_R = tl.zeros((SLOTS,), tl.int32)
    first_R = zero_R + (first - start).to(tl.int32)
    value_RD = tap(
        x + start * D, state, slot_R, zero_R + sequence, first_R, inside_R, col_D, D, W=W, STATE=STATE
    )  # fmt: skip
    at_RD = (sequence * D + col_D[None, :]) * (W - 1) + slot_R[:, None]
    inside_RD = inside_R[:, None] & (col_D < D)[None, :]
    tl.store(final_state + at_RD, value_RD.to(final_state.dtype.element_ty), mask=inside_RD)


@triton.jit
def gradient_before_activation(
    dy, x, weight, bias, state, row_R, sequence_R, first_R, inside_R, col_D, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dy act'(filtered) [R, D] in fp32; zeros at rows that do not exist."""
    inside_RD = inside_R[:, None] & (col_D < D)[None, :]
    grad_RD = tl.load(dy + row_R[:, None] * D + col_D[None, :], mask=inside_RD, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        pre_RD = before_activation(
            x, weight, bias, state, row_R, sequence_R, first_R, inside_R, col_D, D,
            W=W, BIAS=BIAS, STATE=STATE, ROWS=ROWS, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        _value_RD, slope_RD = activation_and_slope(pre_RD, ACTIVATION=ACTIVATION, ALPHA=1.0)
        grad_RD *= slope_RD
    return grad_RD


@triton.jit
def state_gradient(d_final, row_R, sequence_R, end_R, inside_R, col_D, D, W: tl.constexpr):
    """What flows into inputs [R, D] because they are kept as the final state."""
    slot_R = row_R - end_R + (W - 1)
    kept_RD = (inside_R & (slot_R >= 0))[:, None] & (col_D < D)[None, :]
    at_RD = (sequence_R[:, None] * D + col_D[None, :]) * (W - 1) + slot_R[:, None]
    return tl.load(d_final + at_RD, mask=kept_RD, other=0.0).to(tl.float32)


@triton.jit
def backward_kernel(
    dy, d_final, x, weight, bias, state, dx, d_weight, d_bias, sequences, cu_seqlens, rows, length, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_R = tl.arange(0, ROWS)
    tap_W = tl.arange(0, TAPS)
    d_weight_WD = tl.zeros((TAPS, BLOCK_D), tl.float32)
    d_bias_D = tl.zeros((BLOCK_D,), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        start = tl.cast(tile, tl.int64) * ROWS
        inside_R = row_R < rows - start
        sequence_R, first_R, end_R = sequence_of(start, row_R, inside_R, sequences, cu_seqlens, length, PACKED=PACKED)
        dx_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for later in tl.static_range(W):
            # the row ``later`` further on read this one through tap W - 1 - later
            grad_RD = gradient_before_activation(
                dy + start * D, x + start * D, weight, bias, state, row_R + later, sequence_R, first_R,
                inside_R & (row_R + later < end_R), col_D, D,
                W=W, ACTIVATION=ACTIVATION, BIAS=BIAS, STATE=STATE, ROWS=ROWS, BLOCK_D=BLOCK_D,
            )  # fmt: skip
            weight_D = tl.load(weight + col_D * W + (W - 1 - later), mask=col_D < D, other=0.0).to(tl.float32)
            dx_RD += weight_D[None, :] * grad_RD
            if later == 0:
                if BIAS_GRADIENT:
                    d_bias_D += tl.sum(grad_RD, axis=0)
                if WEIGHT_GRADIENT:
                    for w in tl.static_range(W):
                        read_RD = tap(
                            x + start * D, state, row_R - (W - 1) + w, sequence_R, first_R, inside_R, col_D, D,
                            W=W, STATE=STATE,
                        )  # fmt: skip
                        share_D = tl.sum(grad_RD * read_RD, axis=0)
                        d_weight_WD += tl.where((tap_W == w)[:, None], share_D[None, :], 0.0)
        if FINAL:
            dx_RD += state_gradient(d_final, row_R, sequence_R, end_R, inside_R, col_D, D, W=W)
        inside_RD = inside_R[:, None] & (col_D < D)[None, :]
        tl.store(dx + start * D + row_R[:, None] * D + col_D[None, :], dx_RD.to(dx.dtype.element_ty), mask=inside_RD)
    if WEIGHT_GRADIENT:
        at_WD = (program.to(tl.int64) * W + tap_W[:, None]) * D + col_D[None, :]
        tl.store(d_weight + at_WD, d_weight_WD, mask=(tap_W < W)[:, None] & (col_D < D)[None, :])
    if BIAS_GRADIENT:
        tl.store(d_bias + program.to(tl.int64) * D + col_D, d_bias_D, mask=col_D < D)


@triton.jit
def state_backward_kernel(
    dy, d_final, x, weight, bias, state, d_state, cu_seqlens, length, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of the initial state: its slots are rows before the sequence's first."""
    sequence = tl.program_id(0).to(tl.int64)
    col_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, count = bounds_of(sequence, cu_seqlens, length, PACKED=PACKED)
    # rows are counted from the oldest slot, W - 1 before the sequence
    start = first - (W - 1)
    slot_R = tl.arange(0, SLOTS)
    inside_R = slot_R < W - 1
    zero_R = tl.zeros((SLOTS,), tl.int32)
    sequence_R, first_R = zero_R + sequence, zero_R + (W - 1)
    end_R = zero_R + (count + (W - 1)).to(tl.int32)
    dx_RD = tl.zeros((SLOTS, BLOCK_D), tl.float32)
    for later in tl.static_range(1, W):
        at_R = slot_R + later
        grad_RD = gradient_before_activation(
            dy + start * D, x + start * D, weight, bias, state, at_R, sequence_R, first_R,
            inside_R & (at_R >= first_R) & (at_R < end_R), col_D, D,
            W=W, ACTIVATION=ACTIVATION, BIAS=BIAS, STATE=True, ROWS=SLOTS, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        weight_D = tl.load(weight + col_D * W + (W - 1 - later), mask=col_D < D, other=0.0).to(tl.float32)
        dx_RD += weight_D[None, :] * grad_RD
    if FINAL:
        dx_RD += state_gradient(d_final, slot_R, sequence_R, end_R, inside_R, col_D, D, W=W)
    at_RD = (sequence * D + col_D[None, :]) * (W - 1) + slot_R[:, None]
    tl.store(d_state + at_RD, dx_RD.to(d_state.dtype.element_ty), mask=inside_R[:, None] & (col_D < D)[None, :])


def sequence_numbers(cu_seqlens, rows):
    """Sequence [rows] (int64) of each row of packed sequences."""
    at = torch.arange(rows, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True)


def bucket(tensors, spec):
    """Configurations depend on the number of channels only."""
    return {"channels": tensors["x"].shape[-1]}


def outputs_like(tensors, spec, config):
    """Empty y [B, T, D] and final_state [N, D, W - 1] in x's dtype; nothing is saved beyond the inputs."""
    x = tensors["x"]
    cu_seqlens = tensors.get("cu_seqlens")
    outputs = {"y": torch.empty_like(x)}
    if spec.states:
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        outputs["final_state"] = x.new_empty(sequences, x.shape[-1], spec.width - 1)
    return outputs, {}


def forward(tensors, spec, config):
    """The outputs, and what backward needs beyond the inputs: nothing.

    Raises:
        ValueError: packed sequences in a batch of more than one row.
    """
    x, cu_seqlens = tensors["x"], tensors.get("cu_seqlens")
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"packed sequences need a batch of 1, not {x.shape[0]}")
    outputs, saved = outputs_like(tensors, spec, config)
    rows, channels = x.shape[0] * x.shape[1], x.shape[-1]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    state = tensors.get("initial_state") if spec.states else None
    block = min(config["block_channels"], triton.next_power_of_2(max(channels, 1)))
    blocks = -(-channels // block)
    if rows > 0 and channels > 0:
        forward_kernel[(-(-rows // config["forward_rows"]), blocks)](
            x, tensors["weight"], tensors["bias"] if spec.bias else None, state, outputs["y"],
            None if cu_seqlens is None else sequence_numbers(cu_seqlens, rows), cu_seqlens, rows, x.shape[1], channels,
            W=spec.width, ACTIVATION=spec.activation, BIAS=spec.bias, STATE=state is not None,
            PACKED=cu_seqlens is not None, ROWS=config["forward_rows"], BLOCK_D=block,
            num_warps=config["forward_warps"],
        )  # fmt: skip
    if spec.states and outputs["final_state"].numel() > 0:
        final_state = outputs["final_state"]
        final_state_kernel[(final_state.shape[0], blocks)](
            x, state, final_state, cu_seqlens, x.shape[1], channels,
            W=spec.width, STATE=state is not None, PACKED=cu_seqlens is not None,
            SLOTS=triton.next_power_of_2(spec.width - 1), BLOCK_D=block, num_warps=4,
        )  # fmt: skip
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; a gradient that did not come in counts as zero."""
    x, weight = tensors["x"], tensors["weight"]
    cu_seqlens = tensors.get("cu_seqlens")
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    state = tensors.get("initial_state") if spec.states else None
    bias = tensors["bias"] if spec.bias else None
    rows, channels = x.shape[0] * x.shape[1], x.shape[-1]
    dy = grads["y"]
    if dy is None:
        dy = torch.zeros_like(x)
    d_final = grads["final_state"] if spec.states else None
    weight_gradient = "weight" in needs
    bias_gradient = spec.bias and "bias" in needs
    block = min(config["block_channels"], triton.next_power_of_2(max(channels, 1)))
    blocks = -(-channels // block)
    programs = min(-(-rows // config["backward_rows"]), config["backward_programs"])

    dx = torch.empty_like(x)
    d_weight = x.new_empty((programs, spec.width, channels), dtype=torch.float32) if weight_gradient else None
    d_bias = x.new_empty((programs, channels), dtype=torch.float32) if bias_gradient else None
    if rows > 0 and channels > 0:
        backward_kernel[(programs, blocks)](
            dy, d_final, x, weight, bias, state, dx, d_weight, d_bias,
            None if cu_seqlens is None else sequence_numbers(cu_seqlens, rows), cu_seqlens, rows, x.shape[1], channels,
            W=spec.width, ACTIVATION=spec.activation, BIAS=spec.bias, STATE=state is not None,
            PACKED=cu_seqlens is not None, FINAL=d_final is not None, WEIGHT_GRADIENT=weight_gradient,
            BIAS_GRADIENT=bias_gradient, TAPS=triton.next_power_of_2(spec.width), ROWS=config["backward_rows"],
            BLOCK_D=block, num_warps=config["backward_warps"],
        )  # fmt: skip
    gradients = {}
    if "x" in needs:
        gradients["x"] = dx
    if weight_gradient:
        gradients["weight"] = d_weight.sum(0).t().to(weight.dtype)
    if bias_gradient:
        gradients["bias"] = d_bias.sum(0).to(bias.dtype)
    if state is not None and "initial_state" in needs:
        d_state = torch.empty_like(state)
        if d_state.numel() > 0:
            state_backward_kernel[(state.shape[0], blocks)](
                dy, d_final, x, weight, bias, state, d_state, cu_seqlens, x.shape[1], channels,
                W=spec.width, ACTIVATION=spec.activation, BIAS=spec.bias, PACKED=cu_seqlens is not None,
                FINAL=d_final is not None, SLOTS=triton.next_power_of_2(spec.width - 1), BLOCK_D=block, num_warps=4,
            )  # fmt: skip
        gradients["initial_state"] = d_state
    return gradients
