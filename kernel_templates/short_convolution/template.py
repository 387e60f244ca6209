"""Short causal convolution along the sequence, one filter a channel: forward and backward, states, packed sequences.

Tensors are rows [N, D]: the tokens of all sequences one after the other, channels last, as linear attention and
Mamba hold them. A program takes a strip of rows and a block of channels and walks down the rows with the last W - 1 of
them in registers, so each is read once (the W - 1 around a strip twice). All arithmetic is fp32. Backward keeps W
running sums of dx and its share of the weights' gradient in registers as well; a second kernel adds the shares of all
strips, so two runs are bitwise equal.

Legend: D channels of a block, W taps; several rows in registers are tuples of [D]. A row's *first* is the first row of
its sequence, its *end* one past the last; these and row numbers are 64 bits wide. The W - 1 slots of a state, oldest
first, are the rows before ``first`` (initial) or before ``end`` (final).
"""

import torch
import triton
import triton.language as tl

from kernel_templates.tl_ops import activation, activation_and_slope

SHARE_ROWS, SHARE_COLUMNS = 16, 128  # tile of the kernel that adds up the shares of the weights' gradient


@triton.jit
def sequence_at(row, cu_seqlens, sequences):
    """Number, first row and end (all int64) of the packed sequence that ``row`` belongs to, by bisection."""
    low = tl.cast(0, tl.int64)
    high = tl.cast(sequences, tl.int64) - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle + 1) <= row:
            low = middle + 1
        else:
            high = middle
    return low, tl.load(cu_seqlens + low).to(tl.int64), tl.load(cu_seqlens + low + 1).to(tl.int64)


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
def place_of(program, D, BLOCK_D: tl.constexpr):
    """Strip (int64) and columns of a program; the columns of a strip run side by side."""
    blocks = tl.cdiv(D, BLOCK_D)
    return (program // blocks).to(tl.int64), (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)


@triton.jit
def strip_of(strip, cu_seqlens, sequences, rows, length, strips, PACKED: tl.constexpr, STRIP: tl.constexpr):
    """Of a strip of rows: its first row; number, first row and end of the sequence there; the end of all its rows.

    Packed sequences share strips; otherwise a strip lies in one sequence.
    """
    if PACKED:
        start = strip * STRIP
        sequence, first, end = sequence_at(start, cu_seqlens, sequences)
        limit = tl.cast(rows, tl.int64)
    else:
        sequence = strip // strips
        first = sequence * length
        end = first + length
        start = first + (strip - sequence * strips) * STRIP
        limit = end
    return start, sequence, first, end, limit


@triton.jit
def filter_taps(weight, col_D, D, W: tl.constexpr):
    """The W taps [D] in fp32, the one for the oldest row first."""
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + col_D * W + w, mask=col_D < D, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def rows_before(x, state, row, sequence, first, col_D, D, W: tl.constexpr, STATE: tl.constexpr):
    """The W - 1 inputs [D] before ``row``, latest first: earlier rows of its sequence, the state's slots, or zeros."""
    before = ()
    for j in tl.static_range(1, W):
        inside_D = col_D < D
        value_D = tl.load(x + (row - j) * D + col_D, mask=inside_D & (row - j >= first), other=0.0).to(tl.float32)
        if STATE:
            at_D = (sequence * D + col_D) * (W - 1) + (row - j - first + (W - 1))
            value_D += tl.load(state + at_D, mask=inside_D & (row - j < first), other=0.0).to(tl.float32)
        before = before + (value_D,)
    return before


@triton.jit
def next_sequence(row, sequence, first, end, cu_seqlens, sequences):
    """The packed sequence of ``row``, given that of the row before it; empty ones are passed over."""
    while (row >= end) & (sequence + 1 < sequences):
        sequence += 1
        first = end
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    return sequence, first, end


@triton.jit
def started_anew(before, state, row, sequence, first, col_D, D, W: tl.constexpr, STATE: tl.constexpr):
    """``before``, unless ``row`` is the first of its sequence: then the state's slots or zeros."""
    found = ()
    for j in tl.static_range(1, W):
        value_D = tl.where(row == first, 0.0, before[j - 1])
        if STATE:
            at_D = (sequence * D + col_D) * (W - 1) + (W - 1 - j)
            value_D += tl.load(state + at_D, mask=(col_D < D) & (row == first), other=0.0).to(tl.float32)
        found = found + (value_D,)
    return found


@triton.jit
def filtered(x_D, before, taps, bias_D, W: tl.constexpr, BIAS: tl.constexpr):
    """One filtered row [D] in fp32."""
    sum_D = taps[0] * before[W - 2]
    for w in tl.static_range(1, W - 1):
        sum_D += taps[w] * before[W - 2 - w]
    sum_D += taps[W - 1] * x_D
    if BIAS:
        sum_D += bias_D
    return sum_D


@triton.jit
def shifted(newest_D, older, W: tl.constexpr):
    """W - 1 rows, latest first, after another one has come."""
    found = (newest_D,)
    for j in tl.static_range(W - 2):
        found = found + (older[j],)
    return found


@triton.jit
def forward_kernel(
    x, weight, bias, state, y, cu_seqlens, sequences, rows, length, strips, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    STRIP: tl.constexpr, UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    strip, col_D = place_of(tl.program_id(0), D, BLOCK_D=BLOCK_D)
    start, sequence, first, end, limit = strip_of(
        strip, cu_seqlens, sequences, rows, length, strips, PACKED=PACKED, STRIP=STRIP
    )
    taps = filter_taps(weight, col_D, D, W=W)
    bias_D = tl.zeros((BLOCK_D,), tl.float32)
    if BIAS:
        bias_D = tl.load(bias + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    before = rows_before(x, state, start, sequence, first, col_D, D, W=W, STATE=STATE)
    here = tl.minimum(limit - start, STRIP).to(tl.int32)
    for step in range(0, here, UNROLL):
        # the loads of all rows first: they do not wait for the stores
        read = ()
        for u in tl.static_range(UNROLL):
            row = start + step + u
            read = read + (tl.load(x + row * D + col_D, mask=(col_D < D) & (row < limit), other=0.0),)
        for u in tl.static_range(UNROLL):
            row = start + step + u
            if PACKED:
                sequence, first, end = next_sequence(row, sequence, first, end, cu_seqlens, sequences)
                before = started_anew(before, state, row, sequence, first, col_D, D, W=W, STATE=STATE)
            x_D = read[u].to(tl.float32)
            y_D = filtered(x_D, before, taps, bias_D, W=W, BIAS=BIAS)
            if ACTIVATION != "none":
                y_D = activation(y_D, ACTIVATION=ACTIVATION, ALPHA=1.0)
            tl.store(y + row * D + col_D, y_D.to(y.dtype.element_ty), mask=(col_D < D) & (row < limit))
            before = shifted(x_D, before, W=W)


@triton.jit
def final_state_kernel(
    x, state, final_state, cu_seqlens, length, D,
    W: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs of each sequence; those of the initial state where it is shorter."""
    sequence = tl.program_id(0).to(tl.int64)
    col_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, count = bounds_of(sequence, cu_seqlens, length, PACKED=PACKED)
    last = rows_before(x, state, first + count, sequence, first, col_D, D, W=W, STATE=STATE)
    for slot in tl.static_range(W - 1):
        at_D = (sequence * D + col_D) * (W - 1) + slot
        tl.store(final_state + at_D, last[W - 2 - slot].to(final_state.dtype.element_ty), mask=col_D < D)


@triton.jit
def through_activation(
    dy_D, x_D, before, taps, bias_D, W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """dy act'(filtered) of one row [D] in fp32."""
    grad_D = dy_D.to(tl.float32)
    if ACTIVATION != "none":
        pre_D = filtered(x_D, before, taps, bias_D, W=W, BIAS=BIAS)
        _value_D, slope_D = activation_and_slope(pre_D, ACTIVATION=ACTIVATION, ALPHA=1.0)
        grad_D *= slope_D
    return grad_D


@triton.jit
def flows_after(grad_D, flows, taps, kept_D, row, first, W: tl.constexpr, PACKED: tl.constexpr):
    """Gradients of the last W inputs, latest first, after the gradient of one more filtered row flowed into them.

    ``flows`` are those of the W - 1 inputs before, ``kept_D`` is what the latest gets beside the filter.
    """
    found = (kept_D + taps[W - 1] * grad_D,)
    for j in tl.static_range(1, W):
        flow_D = taps[W - 1 - j] * grad_D
        if PACKED:
            flow_D = tl.where(row - j >= first, flow_D, 0.0)
        found = found + (flows[j - 1] + flow_D,)
    return found


@triton.jit
def first_of(values, COUNT: tl.constexpr):
    """The first COUNT of a tuple."""
    found = ()
    for j in tl.static_range(COUNT):
        found = found + (values[j],)
    return found


@triton.jit
def weight_shares(shares, grad_D, x_D, before, W: tl.constexpr):
    """The sums of dweight, one [D] a tap, with one more row."""
    found = ()
    for w in tl.static_range(W - 1):
        found = found + (shares[w] + grad_D * before[W - 2 - w],)
    return found + (shares[W - 1] + grad_D * x_D,)


@triton.jit
def kept_gradient(d_final, row, sequence, end, here, col_D, D, W: tl.constexpr):
    """What flows into the input [D] of a row because it is kept as the final state."""
    slot = row - end + (W - 1)
    inside_D = (col_D < D) & here & (slot >= 0)
    return tl.load(d_final + (sequence * D + col_D) * (W - 1) + slot, mask=inside_D, other=0.0).to(tl.float32)


@triton.jit
def backward_kernel(
    dy, d_final, x, weight, bias, state, dx, partial, cu_seqlens, sequences, rows, length, strips, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
    STRIP: tl.constexpr, UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx, and this strip's share [W + 1, D] of the gradients of weight and bias.

    What row t passes on to the inputs t - W + 1 .. t is added to W running sums, of which the oldest is complete then.
    The W - 1 rows below the strip are walked as well, for what they pass on to it.
    """
    strip, col_D = place_of(tl.program_id(0), D, BLOCK_D=BLOCK_D)
    start, sequence, first, end, limit = strip_of(
        strip, cu_seqlens, sequences, rows, length, strips, PACKED=PACKED, STRIP=STRIP
    )
    taps = filter_taps(weight, col_D, D, W=W)
    zero_D = tl.zeros((BLOCK_D,), tl.float32)
    bias_D = zero_D
    if BIAS:
        bias_D = tl.load(bias + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    before = rows_before(x, state, start, sequence, first, col_D, D, W=W, STATE=STATE)
    flows, shares = (), ()
    for _ in tl.static_range(W - 1):
        flows = flows + (zero_D,)
    for _ in tl.static_range(W):
        shares = shares + (zero_D,)
    d_bias_D = zero_D
    here = tl.minimum(limit - start, STRIP).to(tl.int32)
    for step in range(0, here, UNROLL):
        # the loads of all rows first: they do not wait for the stores
        read, given = (), ()
        for u in tl.static_range(UNROLL):
            row = start + step + u
            inside_D = (col_D < D) & (row < limit)
            read = read + (tl.load(x + row * D + col_D, mask=inside_D, other=0.0),)
            given = given + (tl.load(dy + row * D + col_D, mask=inside_D, other=0.0),)
        for u in tl.static_range(UNROLL):
            row = start + step + u
            if PACKED:
                sequence, first, end = next_sequence(row, sequence, first, end, cu_seqlens, sequences)
                before = started_anew(before, state, row, sequence, first, col_D, D, W=W, STATE=STATE)
            x_D = read[u].to(tl.float32)
            grad_D = through_activation(given[u], x_D, before, taps, bias_D, W=W, ACTIVATION=ACTIVATION, BIAS=BIAS)
            if BIAS_GRADIENT:
                d_bias_D += grad_D
            if WEIGHT_GRADIENT:
                shares = weight_shares(shares, grad_D, x_D, before, W=W)
            kept_D = zero_D
            if FINAL:
                kept_D = kept_gradient(d_final, row, sequence, end, row < limit, col_D, D, W=W)
            through = flows_after(grad_D, flows, taps, kept_D, row, first, W=W, PACKED=PACKED)
            done = row - (W - 1)
            inside_D = (col_D < D) & (done >= start) & (done < limit)
            tl.store(dx + done * D + col_D, through[W - 1].to(dx.dtype.element_ty), mask=inside_D)
            flows = first_of(through, COUNT=W - 1)
            before = shifted(x_D, before, W=W)
    for u in tl.static_range(W - 1):
        row = start + tl.cdiv(here, UNROLL) * UNROLL + u
        inside_D = (col_D < D) & (row < limit)
        if PACKED:
            sequence, first, end = next_sequence(row, sequence, first, end, cu_seqlens, sequences)
            before = started_anew(before, state, row, sequence, first, col_D, D, W=W, STATE=STATE)
        x_D = tl.load(x + row * D + col_D, mask=inside_D, other=0.0).to(tl.float32)
        dy_D = tl.load(dy + row * D + col_D, mask=inside_D, other=0.0)
        grad_D = through_activation(dy_D, x_D, before, taps, bias_D, W=W, ACTIVATION=ACTIVATION, BIAS=BIAS)
        through = flows_after(grad_D, flows, taps, zero_D, row, first, W=W, PACKED=PACKED)
        done = row - (W - 1)
        inside_D = (col_D < D) & (done >= start) & (done < limit)
        tl.store(dx + done * D + col_D, through[W - 1].to(dx.dtype.element_ty), mask=inside_D)
        flows = first_of(through, COUNT=W - 1)
        before = shifted(x_D, before, W=W)
    # without gradients of weight and bias there is no partial to point into
    share = strip * (W + 1)
    if WEIGHT_GRADIENT:
        for w in tl.static_range(W):
            tl.store(partial + (share + w) * D + col_D, shares[w], mask=col_D < D)
    if BIAS_GRADIENT:
        tl.store(partial + (share + W) * D + col_D, d_bias_D, mask=col_D < D)


@triton.jit
def shares_kernel(
    partial, d_weight, d_bias, count, D,
    W: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d_weight [D, W] or d_bias [D]: the sum over strips of one row of their shares [strips, W + 1, D]."""
    col_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    tap = tl.program_id(1)
    if not WEIGHT_GRADIENT:
        tap = W
    sum_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(0, count, ROWS):
        strip_R = start + tl.arange(0, ROWS)
        at_RD = (strip_R.to(tl.int64)[:, None] * (W + 1) + tap) * D + col_D[None, :]
        inside_RD = (strip_R < count)[:, None] & (col_D < D)[None, :]
        sum_RD += tl.load(partial + at_RD, mask=inside_RD, other=0.0)
    sum_D = tl.sum(sum_RD, axis=0)
    if WEIGHT_GRADIENT:
        inside_D = (col_D < D) & (tap < W)
        tl.store(d_weight + col_D * W + tap, sum_D.to(d_weight.dtype.element_ty), mask=inside_D)
    if BIAS_GRADIENT:
        tl.store(d_bias + col_D, sum_D.to(d_bias.dtype.element_ty), mask=(col_D < D) & (tap == W))


@triton.jit
def state_backward_kernel(
    dy, d_final, x, weight, bias, state, d_state, cu_seqlens, length, D,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of the initial state: what the first W - 1 rows of a sequence pass on to the rows before it."""
    sequence = tl.program_id(0).to(tl.int64)
    col_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, count = bounds_of(sequence, cu_seqlens, length, PACKED=PACKED)
    end = first + count
    taps = filter_taps(weight, col_D, D, W=W)
    zero_D = tl.zeros((BLOCK_D,), tl.float32)
    bias_D = zero_D
    if BIAS:
        bias_D = tl.load(bias + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    before = rows_before(x, state, first, sequence, first, col_D, D, W=W, STATE=True)
    flows = ()
    for _ in tl.static_range(W - 1):
        flows = flows + (zero_D,)
    for slot in tl.static_range(W - 1):
        row = first + slot
        inside_D = (col_D < D) & (row < end)
        x_D = tl.load(x + row * D + col_D, mask=inside_D, other=0.0).to(tl.float32)
        dy_D = tl.load(dy + row * D + col_D, mask=inside_D, other=0.0)
        grad_D = through_activation(dy_D, x_D, before, taps, bias_D, W=W, ACTIVATION=ACTIVATION, BIAS=BIAS)
        through = flows_after(grad_D, flows, taps, zero_D, row, first, W=W, PACKED=False)
        d_slot_D = through[W - 1]
        if FINAL:
            d_slot_D += kept_gradient(d_final, row - (W - 1), sequence, end, row >= first, col_D, D, W=W)
        at_D = (sequence * D + col_D) * (W - 1) + slot
        tl.store(d_state + at_D, d_slot_D.to(d_state.dtype.element_ty), mask=col_D < D)
        flows = first_of(through, COUNT=W - 1)
        before = shifted(x_D, before, W=W)


def strips_of(x, cu_seqlens, strip):
    """Strips of a sequence and in all; packed sequences share strips."""
    if cu_seqlens is not None:
        return 0, -(-x.shape[1] // strip)
    of_one = -(-x.shape[1] // strip)
    return of_one, x.shape[0] * of_one


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
    state = tensors.get("initial_state") if spec.states else None
    block = min(config["block_channels"], triton.next_power_of_2(max(channels, 1)))
    blocks = -(-channels // block)
    if rows > 0 and channels > 0:
        of_one, strips = strips_of(x, cu_seqlens, config["forward_strip"])
        forward_kernel[(blocks * strips,)](
            x, tensors["weight"], tensors["bias"] if spec.bias else None, state, outputs["y"],
            cu_seqlens, 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, rows, x.shape[1], of_one, channels,
            W=spec.width, ACTIVATION=spec.activation, BIAS=spec.bias, STATE=state is not None,
            PACKED=cu_seqlens is not None, STRIP=config["forward_strip"], UNROLL=config["forward_unroll"],
            BLOCK_D=block, num_warps=config["forward_warps"],
        )  # fmt: skip
    if spec.states and outputs["final_state"].numel() > 0:
        final_state = outputs["final_state"]
        final_state_kernel[(final_state.shape[0], blocks)](
            x, state, final_state, cu_seqlens, x.shape[1], channels,
            W=spec.width, STATE=state is not None, PACKED=cu_seqlens is not None,
            BLOCK_D=block, num_warps=config["forward_warps"],
        )  # fmt: skip
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; a gradient that did not come in counts as zero."""
    x, weight = tensors["x"], tensors["weight"]
    cu_seqlens = tensors.get("cu_seqlens")
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
    of_one, strips = strips_of(x, cu_seqlens, config["backward_strip"])

    dx = torch.empty_like(x)
    d_weight = torch.empty_like(weight) if weight_gradient else None
    d_bias = torch.empty_like(bias) if bias_gradient else None
    if rows > 0 and channels > 0:
        shared = weight_gradient or bias_gradient
        partial = x.new_empty((strips, spec.width + 1, channels), dtype=torch.float32) if shared else None
        backward_kernel[(blocks * strips,)](
            dy, d_final, x, weight, bias, state, dx, partial,
            cu_seqlens, 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, rows, x.shape[1], of_one, channels,
            W=spec.width, ACTIVATION=spec.activation, BIAS=spec.bias, STATE=state is not None,
            PACKED=cu_seqlens is not None, FINAL=d_final is not None, WEIGHT_GRADIENT=weight_gradient,
            BIAS_GRADIENT=bias_gradient, STRIP=config["backward_strip"], UNROLL=config["backward_unroll"],
            BLOCK_D=block, num_warps=config["backward_warps"],
        )  # fmt: skip
        if shared:
            share_block = min(SHARE_COLUMNS, triton.next_power_of_2(channels))
            taps = spec.width * weight_gradient + bias_gradient
            shares_kernel[(-(-channels // share_block), taps)](
                partial, d_weight, d_bias, strips, channels,
                W=spec.width, WEIGHT_GRADIENT=weight_gradient, BIAS_GRADIENT=bias_gradient,
                ROWS=SHARE_ROWS, BLOCK_D=share_block, num_warps=4,
            )  # fmt: skip
    else:
        for nothing in (d_weight, d_bias):
            if nothing is not None:
                nothing.zero_()
    gradients = {}
    if "x" in needs:
        gradients["x"] = dx
    if weight_gradient:
        gradients["weight"] = d_weight
    if bias_gradient:
        gradients["bias"] = d_bias
    if state is not None and "initial_state" in needs:
        d_state = torch.empty_like(state)
        if d_state.numel() > 0:
            state_backward_kernel[(state.shape[0], blocks)](
                dy, d_final, x, weight, bias, state, d_state, cu_seqlens, x.shape[1], channels,
                W=spec.width, ACTIVATION=spec.activation, BIAS=spec.bias, PACKED=cu_seqlens is not None,
                FINAL=d_final is not None, BLOCK_D=block, num_warps=config["backward_warps"],
            )  # fmt: skip
        gradients["initial_state"] = d_state
    return gradients
