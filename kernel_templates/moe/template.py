"""Routed gated experts in Triton: sort, grouped GEMMs on ragged rows, weighted sum; forward and backward.

Legend for shapes: T tokens, K slots a token (top-k), E experts, D hidden, I expert width (WIDTH in kernels), R = T K
slots. A *slot* is t K + j. A *row* is a slot's place after the stable sort by expert; rows of expert e are offsets[e]
to offsets[e + 1]. Slots without an expert (index negative or >= E) have no row: ``inverse`` is -1 there and they add
nothing. *Features* are a weight's outputs, for gate_up both halves: i and I + i (concatenated), or 2 i and 2 i + 1
(interleaved); stored intermediates ``h`` and ``dh`` [R, 2I] keep the weight's own order of features. Suffixes of tiles:
M rows of one expert, N features, K depth of a product, R rows that are summed over, P and Q sides of a weight gradient,
T tokens, S slots.

Everything that depends on the routing is decided on the device: the host never learns a count. Row-tiled kernels run a
grid of tile bound x feature tiles; a program past the last tile leaves at once. Sums run in a fixed order, so two runs
agree bitwise. Formulas and the identity for the gradient of the scores: README.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_templates.tl_ops import activation, activation_and_slope

# ---- routing ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["slots", "blocks"])
def _count_kernel(index, counts, slots, blocks, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[e, b]: how many slots of block b chose expert e."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + at, mask=at < slots, other=E)
    # BINS > E, so the last bin is free for slots without an expert
    expert = tl.where((expert < 0) | (expert >= E), BINS - 1, expert).to(tl.int32)
    histogram = tl.histogram(expert, BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + bins * blocks + block, histogram, mask=bins < E)


@triton.jit(do_not_specialize=["slots", "blocks"])
def _rank_kernel(index, counts, ends, slot_of_row, inverse, slots, blocks, E: tl.constexpr, BLOCK: tl.constexpr):
    """Stable counting sort: a slot's row is what comes before its block plus its rank inside the block."""
    block = tl.program_id(0)
    here = tl.arange(0, BLOCK)
    at = block * BLOCK + here
    expert = tl.load(index + at, mask=at < slots, other=E)
    routed = (expert >= 0) & (expert < E)
    expert = tl.where(routed, expert, E).to(tl.int32)
    same = (expert[:, None] == expert[None, :]) & (here[None, :] < here[:, None])
    rank = tl.sum(same.to(tl.int32), 1)
    cell = tl.where(routed, expert, 0) * blocks + block
    before = tl.load(ends + cell) - tl.load(counts + cell)
    row = before + rank
    tl.store(slot_of_row + row, at, mask=routed)
    tl.store(inverse + at, tl.where(routed, row, -1), mask=at < slots)


@triton.jit(do_not_specialize=["bound", "blocks"])
def _tile_kernel(
    ends, offsets, tile_expert, tile_row, bound, blocks,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row offsets of the experts, and for every row tile its expert (-1 past the last tile) and its first row."""
    bins = tl.arange(0, BINS)
    end = tl.load(ends + bins * blocks + blocks - 1, mask=bins < E, other=0)
    start = tl.load(ends + bins * blocks - 1, mask=(bins > 0) & (bins < E), other=0)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + bins + 1, end, mask=bins < E)
        tl.store(offsets + bins, 0, mask=bins == 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.sum((last[None, :] <= at[:, None]).to(tl.int32), 1)
    # tile i of the expert whose tiles begin at f starts at row start + (i - f) BLOCK_M
    shift = start - (last - tiles) * BLOCK_M
    row = at * BLOCK_M + tl.sum(tl.where(owner[:, None] == bins[None, :], shift[None, :], 0), 1)
    tl.store(tile_expert + at, tl.where(owner < E, owner, -1), mask=at < bound)
    tl.store(tile_row + at, row, mask=at < bound)


# ---- gate and up -----------------------------------------------------------------------------------------------


@triton.jit
def _gate_up_features(tile, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The 2 BLOCK_N features of a tile of BLOCK_N gate/up pairs, and which of them exist."""
    place = tl.arange(0, 2 * BLOCK_N)
    if INTERLEAVED:
        feature = tile * (2 * BLOCK_N) + place
        exists = feature < 2 * WIDTH
    else:
        pair = tile * BLOCK_N + place % BLOCK_N
        feature = pair + (place // BLOCK_N) * WIDTH
        exists = pair < WIDTH
    return feature, exists


@triton.jit
def _split_pairs(both, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up [BLOCK_M, BLOCK_N] of a tile [BLOCK_M, 2 BLOCK_N]; free in the layout of a wgmma accumulator."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    return gate, up


@triton.jit
def _mark_clamped(h_MN, feature, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr):
    """h with clamped values at twice the limit, so that rounding to the storage dtype cannot move one across it.

    Backward only asks on which side a clamped value was; a crossing would pass or stop its gradient wrongly.
    """
    if INTERLEAVED:
        is_up = feature % 2 == 1
    else:
        is_up = feature >= WIDTH
    h_MN = tl.where(h_MN > LIMIT, 2 * LIMIT, h_MN)
    return tl.where(is_up[None, :] & (h_MN < -LIMIT), -2 * LIMIT, h_MN)


@triton.jit
def _gated(
    gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """a = act(min(gate, limit)) (clamp(up, -limit, limit) + offset)."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return activation(gate, ACTIVATION, ALPHA) * (up + UP_OFFSET)


@triton.jit
def _gated_backward(
    da, gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """Gradients of stored gate and up; a clamped value (see :func:`_mark_clamped`) gets none."""
    clipped_gate = gate
    clipped_up = up
    if LIMIT is not None:
        clipped_gate = tl.where(gate > LIMIT, LIMIT, gate)
        clipped_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    value, slope = activation_and_slope(clipped_gate, ACTIVATION, ALPHA)
    dgate = da * slope * (clipped_up + UP_OFFSET)
    dup = da * value
    if LIMIT is not None:
        dgate = tl.where(gate > 1.5 * LIMIT, 0.0, dgate)
        dup = tl.where((up > 1.5 * LIMIT) | (up < -1.5 * LIMIT), 0.0, dup)
    return dgate, dup


# ---- grouped GEMMs over rows -----------------------------------------------------------------------------------


@triton.jit
def _row_tile_product(
    a_row, w_feature, feature_exists,
    DEPTH: tl.constexpr, W_DEPTH_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """sum_k A[m, k] W[n, k] in fp32 [BLOCK_M, BLOCK_N]; a_row [BLOCK_M], w_feature [BLOCK_N] are pointers at k = 0."""
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        a_at = a_row[:, None] + depth[None, :]
        w_at = w_feature[None, :] + depth[:, None] * W_DEPTH_STRIDE
        if DEPTH % BLOCK_K == 0:
            a_MK = tl.load(a_at)
            if EVEN_N:
                w_KN = tl.load(w_at)
            else:
                w_KN = tl.load(w_at, mask=feature_exists[None, :], other=0.0)
        else:
            inside = depth < DEPTH
            a_MK = tl.load(a_at, mask=inside[None, :], other=0.0)
            w_KN = tl.load(w_at, mask=inside[:, None] & feature_exists[None, :], other=0.0)
        acc_MN = tl.dot(a_MK, w_KN, acc_MN, input_precision="ieee")
    return acc_MN


@triton.jit
def _up_tile(
    x, gate_up, bias, slot_of_row, h, a, expert, tile, start, end,
    K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, W_FEATURE: tl.constexpr, W_DEPTH: tl.constexpr,
    BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of :func:`_up_kernel`: rows from ``start`` on, gate/up pairs of feature tile ``tile``."""
    here = tl.arange(0, BLOCK_M)
    exists = start + here < end
    # rows past the expert's last are computed from its first row and not stored
    token = tl.load(slot_of_row + tl.where(exists, start + here, start)) // K
    feature, present = _gate_up_features(tile, WIDTH, BLOCK_N, INTERLEAVED)
    weight = gate_up + expert.to(tl.int64) * (2 * WIDTH * D)
    h_MN = _row_tile_product(
        x + token.to(tl.int64) * D, weight + feature * W_FEATURE, present,
        D, W_DEPTH, BLOCK_M, 2 * BLOCK_N, BLOCK_K, WIDTH % BLOCK_N == 0,
    )  # fmt: skip
    if BIAS:
        h_MN += tl.load(bias + expert * (2 * WIDTH) + feature, mask=present, other=0.0).to(tl.float32)[None, :]
    if LIMIT is None:
        kept_MN = h_MN
    else:
        kept_MN = _mark_clamped(h_MN, feature, WIDTH, INTERLEAVED, LIMIT)
    # a scalar base and 32-bit offsets: 64-bit ones of a whole tile would take twice the registers
    tl.store(
        h + start.to(tl.int64) * (2 * WIDTH) + (here[:, None] * (2 * WIDTH) + feature[None, :]),
        kept_MN.to(h.dtype.element_ty),
        mask=exists[:, None] & present[None, :],
    )
    gate_MN, up_MN = _split_pairs(h_MN, BLOCK_M, BLOCK_N, INTERLEAVED)
    a_MN = _gated(gate_MN, up_MN, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(
        a + start.to(tl.int64) * WIDTH + (here[:, None] * WIDTH + column[None, :]),
        a_MN.to(a.dtype.element_ty),
        mask=exists[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit
def _up_kernel(
    x, gate_up, bias, slot_of_row, offsets, tile_expert, tile_row, h, a,
    K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, W_FEATURE: tl.constexpr, W_DEPTH: tl.constexpr,
    BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_M: tl.constexpr,
):  # fmt: skip
    """h = gather(x) W1^T (+ b1) [R, 2I], a = gated(h) [R, I]. BLOCK_N counts gate/up pairs.

    Where TAIL_M < BLOCK_M, an expert's last tile is that small if its rows fit.
    """
    TILES_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    expert = tl.load(tile_expert + program // TILES_N)
    if expert < 0:
        return
    tile = program % TILES_N
    start = tl.load(tile_row + program // TILES_N)
    end = tl.load(offsets + expert + 1)
    if TAIL_M < BLOCK_M:
        if end - start <= TAIL_M:
            _up_tile(
                x, gate_up, bias, slot_of_row, h, a, expert, tile, start, end, K, D, WIDTH, W_FEATURE, W_DEPTH,
                BIAS, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, TAIL_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _up_tile(
                x, gate_up, bias, slot_of_row, h, a, expert, tile, start, end, K, D, WIDTH, W_FEATURE, W_DEPTH,
                BIAS, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _up_tile(
            x, gate_up, bias, slot_of_row, h, a, expert, tile, start, end, K, D, WIDTH, W_FEATURE, W_DEPTH,
            BIAS, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _rows_tile(
    a, weight, bias, slot_of_row, out, expert, tile, start, end,
    K: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, W_FEATURE: tl.constexpr, W_DEPTH: tl.constexpr,
    BIAS: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of :func:`_rows_kernel`: rows from ``start`` on, features of feature tile ``tile``."""
    here = tl.arange(0, BLOCK_M)
    exists = start + here < end
    # rows past the expert's last are computed from its first row and not stored
    safe = tl.where(exists, start + here, start)
    if GATHER:
        safe = tl.load(slot_of_row + safe) // K
    feature = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present = feature < N
    out_MN = _row_tile_product(
        a + safe.to(tl.int64) * DEPTH, weight + expert.to(tl.int64) * (N * DEPTH) + feature * W_FEATURE, present,
        DEPTH, W_DEPTH, BLOCK_M, BLOCK_N, BLOCK_K, N % BLOCK_N == 0,
    )  # fmt: skip
    if BIAS:
        out_MN += tl.load(bias + expert * N + feature, mask=present, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + start.to(tl.int64) * N + (here[:, None] * N + feature[None, :]),
        out_MN.to(out.dtype.element_ty),
        mask=exists[:, None] & present[None, :],
    )


@triton.jit
def _rows_kernel(
    a, weight, bias, slot_of_row, offsets, tile_expert, tile_row, out,
    K: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, W_FEATURE: tl.constexpr, W_DEPTH: tl.constexpr,
    BIAS: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_M: tl.constexpr,
):  # fmt: skip
    """out[r] = W_e a[r] (+ b_e), rows in sorted order: a [R, DEPTH], or with GATHER [T, DEPTH]; out [R, N].

    TAIL_M as in :func:`_up_kernel`.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    expert = tl.load(tile_expert + program // TILES_N)
    if expert < 0:
        return
    tile = program % TILES_N
    start = tl.load(tile_row + program // TILES_N)
    end = tl.load(offsets + expert + 1)
    if TAIL_M < BLOCK_M:
        if end - start <= TAIL_M:
            _rows_tile(
                a, weight, bias, slot_of_row, out, expert, tile, start, end,
                K, DEPTH, N, W_FEATURE, W_DEPTH, BIAS, GATHER, TAIL_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _rows_tile(
                a, weight, bias, slot_of_row, out, expert, tile, start, end,
                K, DEPTH, N, W_FEATURE, W_DEPTH, BIAS, GATHER, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _rows_tile(
            a, weight, bias, slot_of_row, out, expert, tile, start, end,
            K, DEPTH, N, W_FEATURE, W_DEPTH, BIAS, GATHER, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


# ---- through the gate ------------------------------------------------------------------------------------------


@triton.jit
def _hidden_grad_kernel(
    da, h, scores, slot_of_row, offsets, dh, weighted_a, dots,
    E: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    NEED_DH: tl.constexpr, NEED_A: tl.constexpr, NEED_SCORES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """da' [R, I] and h [R, 2I] to dh [R, 2I], s a [R, I] and <da', a> [R]; s a may lie in the memory of da'."""
    # a scalar base and 32-bit offsets: 64-bit ones of a whole tile would take twice the registers
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    here = tl.arange(0, BLOCK_R)
    exists = first + here < tl.load(offsets + E)
    slot = tl.load(slot_of_row + first + here, mask=exists, other=0)
    score = tl.load(scores + slot, mask=exists, other=0.0).to(tl.float32)
    dot_R = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, WIDTH, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        inside = exists[:, None] & (column < WIDTH)[None, :]
        at = here[:, None] * WIDTH + column[None, :]
        if NEED_DH or NEED_SCORES:
            da_RN = tl.load(da + first * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        if INTERLEAVED:
            feature = 2 * start + tl.arange(0, 2 * BLOCK_N)
            both_inside = exists[:, None] & (feature < 2 * WIDTH)[None, :]
            both_at = here[:, None] * (2 * WIDTH) + feature[None, :]
            both = tl.load(h + first * (2 * WIDTH) + both_at, mask=both_inside, other=0.0).to(tl.float32)
            gate_RN, up_RN = tl.split(tl.reshape(both, (BLOCK_R, BLOCK_N, 2)))
        else:
            gate_at = here[:, None] * (2 * WIDTH) + column[None, :]
            gate_RN = tl.load(h + first * (2 * WIDTH) + gate_at, mask=inside, other=0.0).to(tl.float32)
            up_RN = tl.load(h + first * (2 * WIDTH) + WIDTH + gate_at, mask=inside, other=0.0).to(tl.float32)
        if NEED_A or NEED_SCORES:
            a_RN = _gated(gate_RN, up_RN, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
            if NEED_SCORES:
                dot_R += tl.sum(tl.where(inside, da_RN * a_RN, 0.0), 1)
            if NEED_A:
                # da' was read by all threads of this program before its memory is taken
                tl.debug_barrier()
                weighted_RN = (score[:, None] * a_RN).to(weighted_a.dtype.element_ty)
                tl.store(weighted_a + first * WIDTH + at, weighted_RN, mask=inside)
        if NEED_DH:
            dgate_RN, dup_RN = _gated_backward(
                score[:, None] * da_RN, gate_RN, up_RN, ACTIVATION, ALPHA, LIMIT, UP_OFFSET
            )  # fmt: skip
            kind = dh.dtype.element_ty
            if INTERLEAVED:
                both = tl.reshape(tl.join(dgate_RN, dup_RN), (BLOCK_R, 2 * BLOCK_N)).to(kind)
                tl.store(dh + first * (2 * WIDTH) + both_at, both, mask=both_inside)
            else:
                tl.store(dh + first * (2 * WIDTH) + gate_at, dgate_RN.to(kind), mask=inside)
                tl.store(dh + first * (2 * WIDTH) + WIDTH + gate_at, dup_RN.to(kind), mask=inside)
    if NEED_SCORES:
        tl.store(dots + first + here, dot_R, mask=exists)


# ---- copies ----------------------------------------------------------------------------------------------------


@triton.jit
def _spread_kernel(
    source, slot_of_row, offsets, out,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[r] = source[token of row r]."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = row < tl.load(offsets + E)
    token = tl.load(slot_of_row + row, mask=exists, other=0) // K
    inside = exists[:, None] & (d < D)[None, :]
    value_RD = tl.load(source + token.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * D + d[None, :], value_RD, mask=inside)


# ---- sums over an expert's rows --------------------------------------------------------------------------------


@triton.jit
def _transposed(ptr, row, exists, column, WIDTH: tl.constexpr):
    """Rows of [R, WIDTH] as columns; zeros outside."""
    at = ptr + row.to(tl.int64)[None, :] * WIDTH + column[:, None]
    return tl.load(at, mask=exists[None, :] & (column < WIDTH)[:, None], other=0.0)


@triton.jit
def _plain_rows(ptr, row, exists, column, WIDTH: tl.constexpr):
    """Rows of [R, WIDTH]; zeros outside."""
    at = ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return tl.load(at, mask=exists[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _store_weight_grad(out, acc_PQ, expert, first_p, q, P: tl.constexpr, Q: tl.constexpr, BLOCK_P: tl.constexpr):
    """One tile of out [E, P, Q]."""
    p = tl.arange(0, BLOCK_P)
    tl.store(
        out + (expert.to(tl.int64) * P + first_p) * Q + (p[:, None] * Q + q[None, :]),
        acc_PQ.to(out.dtype.element_ty),
        mask=(first_p + p < P)[:, None] & (q < Q)[None, :],
    )


@triton.jit
def _weight_grad_kernel(
    left, right, out, slot_of_row, offsets,
    K: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, MORE_P: tl.constexpr, MORE_Q: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[e, p, q] = sum over rows r of e of left[r, p] right[r, q]; a gathered operand is read at the row's token.

    A tile has BLOCK_P + MORE_P by BLOCK_Q + MORE_Q elements (one MORE is 0): its sides need not be powers of two.
    An expert without rows gets zeros. Rows past the expert's last belong to its neighbour: both operands are masked,
    since zero times infinity is NaN.
    """
    TILES_P: tl.constexpr = (P + BLOCK_P + MORE_P - 1) // (BLOCK_P + MORE_P)
    TILES_Q: tl.constexpr = (Q + BLOCK_Q + MORE_Q - 1) // (BLOCK_Q + MORE_Q)
    program = tl.program_id(0)
    expert = program // (TILES_P * TILES_Q)
    local = program % (TILES_P * TILES_Q)
    first_p = (local % TILES_P) * (BLOCK_P + MORE_P)
    first_q = (local // TILES_P) * (BLOCK_Q + MORE_Q)
    p = first_p + tl.arange(0, BLOCK_P)
    q = first_q + tl.arange(0, BLOCK_Q)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    acc_PQ = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    if MORE_P > 0:
        more_p = first_p + BLOCK_P + tl.arange(0, MORE_P)
        more_PQ = tl.zeros((MORE_P, BLOCK_Q), tl.float32)
    if MORE_Q > 0:
        more_q = first_q + BLOCK_Q + tl.arange(0, MORE_Q)
        more_PQ = tl.zeros((BLOCK_P, MORE_Q), tl.float32)
    for first in range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        exists = row < end
        left_row = row
        right_row = row
        if GATHER_LEFT:
            left_row = tl.load(slot_of_row + row, mask=exists, other=0) // K
        if GATHER_RIGHT:
            right_row = tl.load(slot_of_row + row, mask=exists, other=0) // K
        left_PR = _transposed(left, left_row, exists, p, P)
        right_RQ = _plain_rows(right, right_row, exists, q, Q)
        acc_PQ = tl.dot(left_PR, right_RQ, acc_PQ, input_precision="ieee")
        if MORE_P > 0:
            more_PR = _transposed(left, left_row, exists, more_p, P)
            more_PQ = tl.dot(more_PR, right_RQ, more_PQ, input_precision="ieee")
        if MORE_Q > 0:
            more_RQ = _plain_rows(right, right_row, exists, more_q, Q)
            more_PQ = tl.dot(left_PR, more_RQ, more_PQ, input_precision="ieee")
    _store_weight_grad(out, acc_PQ, expert, first_p, q, P, Q, BLOCK_P)
    if MORE_P > 0:
        _store_weight_grad(out, more_PQ, expert, first_p + BLOCK_P, q, P, Q, MORE_P)
    if MORE_Q > 0:
        _store_weight_grad(out, more_PQ, expert, first_p, more_q, P, Q, BLOCK_P)


@triton.jit
def _bias_grad_kernel(
    source, scores, out, slot_of_row, offsets,
    K: tl.constexpr, N: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e, n] = sum over rows of e of source[r, n]; weighted: of s_r source[token of r, n]."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // TILES_N
    n = (tl.program_id(0) % TILES_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    acc_N = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        exists = row < end
        source_row = row
        factor = tl.full((BLOCK_R,), 1.0, tl.float32)
        if WEIGHTED:
            slot = tl.load(slot_of_row + row, mask=exists, other=0)
            source_row = slot // K
            factor = tl.load(scores + slot, mask=exists, other=0.0).to(tl.float32)
        value_RN = tl.load(
            source + source_row.to(tl.int64)[:, None] * N + n[None, :],
            mask=exists[:, None] & (n < N)[None, :],
            other=0.0,
        )
        acc_N += tl.sum(value_RN.to(tl.float32) * factor[:, None], 0)
    tl.store(out + expert * N + n, acc_N.to(out.dtype.element_ty), mask=n < N)


# ---- sums over a token's slots ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    rows, scores, inverse, out, tokens,
    K: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_j (s_tj) rows[inverse_tj], in slot order and fp32, rounded once."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc_TD = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in range(K):
        row = tl.load(inverse + token * K + j, mask=token < tokens, other=-1)
        present = row >= 0
        value_TD = tl.load(
            rows + row.to(tl.int64)[:, None] * D + d[None, :],
            mask=present[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        if WEIGHTED:
            score = tl.load(scores + token * K + j, mask=present, other=0.0).to(tl.float32)
            value_TD *= score[:, None]
        acc_TD += value_TD
    tl.store(
        out + token.to(tl.int64)[:, None] * D + d[None, :],
        acc_TD.to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=["slots"])
def _score_grad_kernel(
    dots, dy, bias, index, inverse, dscores, slots,
    K: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dscores[slot] = <da', a> of its row (+ <dy_t, b2_e>); zero for a slot without an expert."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(inverse + slot, mask=slot < slots, other=-1)
    present = row >= 0
    acc = tl.load(dots + row, mask=present, other=0.0)
    if BIAS:
        expert = tl.load(index + slot, mask=present, other=0)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            inside = present[:, None] & (d < D)[None, :]
            dy_SD = tl.load(dy + (slot // K).to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
            bias_SD = tl.load(bias + expert[:, None] * D + d[None, :], mask=inside, other=0.0)
            acc += tl.sum(dy_SD.to(tl.float32) * bias_SD.to(tl.float32), 1)
    tl.store(dscores + slot, acc.to(dscores.dtype.element_ty), mask=slot < slots)


# ---- host ------------------------------------------------------------------------------------------------------


def bucket(tensors, spec):
    """Sizes by which a configuration is chosen: mean rows an expert, hidden and expert width; fp32 stands far apart."""
    experts = tensors["gate_up"].shape[0]
    if spec.transposed:
        intermediate = tensors["down"].shape[1]
    else:
        intermediate = tensors["down"].shape[2]
    rows = -(-tensors["index"].numel() // experts)
    if tensors["x"].element_size() > 2:
        fp32 = 1 << 16
    else:
        fp32 = 1
    return {"rows": rows, "hidden": tensors["x"].shape[1], "intermediate": intermediate, "fp32": fp32}


def outputs_like(tensors, spec, config):
    """Empty y [T, D] and saved tensors: h [R, 2I] and the int32 routing tables."""
    x = tensors["x"]
    slots = tensors["index"].numel()
    experts = tensors["gate_up"].shape[0]
    if spec.transposed:
        intermediate = tensors["down"].shape[1]
    else:
        intermediate = tensors["down"].shape[2]
    bound = -(-slots // config["block_m"]) + experts
    table = {"dtype": torch.int32, "device": x.device}
    saved = {
        "h": torch.empty((slots, 2 * intermediate), dtype=x.dtype, device=x.device),
        "slot_of_row": torch.empty((slots,), **table),
        "inverse": torch.empty((slots,), **table),
        "offsets": torch.empty((experts + 1,), **table),
        "tile_expert": torch.empty((bound,), **table),
        "tile_row": torch.empty((bound,), **table),
    }
    return {"y": torch.empty_like(x)}, saved


def _route(index, saved, experts, config):
    """Fills the routing tables from index [T, K] int64, without a host sync."""
    slots = index.numel()
    block = config["route_block"]
    blocks = triton.cdiv(slots, block)
    bins = triton.next_power_of_2(experts + 1)
    bound = saved["tile_expert"].shape[0]
    counts = torch.empty((experts * blocks,), dtype=torch.int32, device=index.device)
    _count_kernel[(blocks,)](index, counts, slots, blocks, E=experts, BINS=bins, BLOCK=block)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    _rank_kernel[(blocks,)](
        index, counts, ends, saved["slot_of_row"], saved["inverse"], slots, blocks, E=experts, BLOCK=block
    )
    _tile_kernel[(triton.cdiv(bound, config["tile_block"]),)](
        ends,
        saved["offsets"],
        saved["tile_expert"],
        saved["tile_row"],
        bound,
        blocks,
        E=experts,
        BINS=bins,
        BLOCK_M=config["block_m"],
        BLOCK=config["tile_block"],
    )


def forward(tensors, spec, config):
    """y [T, D] of x, index, scores, gate_up, down (and biases); saves h and the routing tables."""
    x, scores, gate_up, down = tensors["x"], tensors["scores"], tensors["gate_up"], tensors["down"]
    outputs, saved = outputs_like(tensors, spec, config)
    tokens, hidden = x.shape
    slots = tensors["index"].numel()
    if slots == 0:
        return outputs, saved
    experts = gate_up.shape[0]
    top_k = slots // tokens
    intermediate = saved["h"].shape[1] // 2
    _route(tensors["index"], saved, experts, config)
    bound = saved["tile_expert"].shape[0]
    a = torch.empty((slots, intermediate), dtype=x.dtype, device=x.device)
    y_rows = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    if spec.bias:
        up_bias, down_bias = tensors["gate_up_bias"], tensors["down_bias"]
    else:
        up_bias, down_bias = None, None
    if spec.transposed:
        up_strides, down_strides = (1, 2 * intermediate), (1, hidden)
    else:
        up_strides, down_strides = (hidden, 1), (intermediate, 1)
    _up_kernel[(bound * triton.cdiv(intermediate, config["up_n"]),)](
        x,
        gate_up,
        up_bias,
        saved["slot_of_row"],
        saved["offsets"],
        saved["tile_expert"],
        saved["tile_row"],
        saved["h"],
        a,
        K=top_k,
        D=hidden,
        WIDTH=intermediate,
        W_FEATURE=up_strides[0],
        W_DEPTH=up_strides[1],
        BIAS=spec.bias,
        INTERLEAVED=spec.gate_up_layout == "interleaved",
        ACTIVATION=spec.activation,
        ALPHA=spec.alpha,
        LIMIT=spec.limit,
        UP_OFFSET=spec.up_offset,
        BLOCK_M=config["block_m"],
        BLOCK_N=config["up_n"],
        BLOCK_K=config["up_k"],
        TAIL_M=config["tail_m"],
        num_warps=config["up_warps"],
        num_stages=config["up_stages"],
    )
    _rows_kernel[(bound * triton.cdiv(hidden, config["rows_n"]),)](
        a,
        down,
        down_bias,
        saved["slot_of_row"],
        saved["offsets"],
        saved["tile_expert"],
        saved["tile_row"],
        y_rows,
        K=top_k,
        DEPTH=intermediate,
        N=hidden,
        W_FEATURE=down_strides[0],
        W_DEPTH=down_strides[1],
        BIAS=spec.bias,
        GATHER=False,
        BLOCK_M=config["block_m"],
        BLOCK_N=config["rows_n"],
        BLOCK_K=config["rows_k"],
        TAIL_M=config["tail_m"],
        num_warps=config["rows_warps"],
        num_stages=config["rows_stages"],
    )
    _combine_kernel[(triton.cdiv(tokens, config["combine_t"]), triton.cdiv(hidden, config["combine_d"]))](
        y_rows,
        scores,
        saved["inverse"],
        outputs["y"],
        tokens,
        K=top_k,
        D=hidden,
        WEIGHTED=True,
        BLOCK_T=config["combine_t"],
        BLOCK_D=config["combine_d"],
    )
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; what nobody needs is neither computed nor written."""
    x, scores, gate_up, down = tensors["x"], tensors["scores"], tensors["gate_up"], tensors["down"]
    dy = grads["y"]
    found = {}
    tokens, hidden = x.shape
    slots = tensors["index"].numel()
    if slots == 0:
        for name in needs:
            found[name] = torch.zeros_like(tensors[name])
        return found
    experts = gate_up.shape[0]
    top_k = slots // tokens
    intermediate = saved["h"].shape[1] // 2
    bound = saved["tile_expert"].shape[0]
    need_dh = "x" in needs or "gate_up" in needs or "gate_up_bias" in needs
    need_a = "down" in needs
    need_scores = "scores" in needs
    dh, weighted_a, dots = None, None, None
    if spec.transposed:
        up_strides, down_strides = (1, 2 * intermediate), (1, hidden)
    else:
        up_strides, down_strides = (hidden, 1), (intermediate, 1)
    # one operand of every weight gradient is read through the tokens, or from a copy in row order
    dy_rows = dy
    if need_a and config["weight_copy"]:
        dy_rows = _spread(dy, saved, experts, top_k, config)
    if need_dh or need_a or need_scores:
        da = torch.empty((slots, intermediate), dtype=x.dtype, device=x.device)
        if need_dh:
            dh = torch.empty_like(saved["h"])
        if need_a:
            weighted_a = da
        if need_scores:
            dots = torch.empty((slots,), dtype=torch.float32, device=x.device)
    if need_dh or need_scores:
        _rows_kernel[(bound * triton.cdiv(intermediate, config["rows_n"]),)](
            dy_rows,
            down,
            None,
            saved["slot_of_row"],
            saved["offsets"],
            saved["tile_expert"],
            saved["tile_row"],
            da,
            K=top_k,
            DEPTH=hidden,
            N=intermediate,
            W_FEATURE=down_strides[1],
            W_DEPTH=down_strides[0],
            BIAS=False,
            GATHER=dy_rows is dy,
            BLOCK_M=config["block_m"],
            BLOCK_N=config["rows_n"],
            BLOCK_K=config["rows_k"],
            TAIL_M=config["tail_m"],
            num_warps=config["rows_warps"],
            num_stages=config["rows_stages"],
        )
    if need_dh or need_a or need_scores:
        _hidden_grad_kernel[(triton.cdiv(slots, config["grad_r"]),)](
            da,
            saved["h"],
            scores,
            saved["slot_of_row"],
            saved["offsets"],
            dh,
            weighted_a,
            dots,
            E=experts,
            WIDTH=intermediate,
            INTERLEAVED=spec.gate_up_layout == "interleaved",
            ACTIVATION=spec.activation,
            ALPHA=spec.alpha,
            LIMIT=spec.limit,
            UP_OFFSET=spec.up_offset,
            NEED_DH=need_dh,
            NEED_A=need_a,
            NEED_SCORES=need_scores,
            BLOCK_R=config["grad_r"],
            BLOCK_N=config["grad_n"],
        )
        del da
    if need_scores:
        if spec.bias:
            score_bias = tensors["down_bias"]
        else:
            score_bias = None
        found["scores"] = torch.empty_like(scores)
        _score_grad_kernel[(triton.cdiv(slots, config["score_block"]),)](
            dots,
            dy,
            score_bias,
            tensors["index"],
            saved["inverse"],
            found["scores"],
            slots,
            K=top_k,
            D=hidden,
            BIAS=spec.bias,
            BLOCK=config["score_block"],
            BLOCK_D=config["score_d"],
        )
    if "x" in needs:
        dx_rows = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
        found["x"] = torch.empty_like(x)
        _rows_kernel[(bound * triton.cdiv(hidden, config["rows_n"]),)](
            dh,
            gate_up,
            None,
            saved["slot_of_row"],
            saved["offsets"],
            saved["tile_expert"],
            saved["tile_row"],
            dx_rows,
            K=top_k,
            DEPTH=2 * intermediate,
            N=hidden,
            W_FEATURE=up_strides[1],
            W_DEPTH=up_strides[0],
            BIAS=False,
            GATHER=False,
            BLOCK_M=config["block_m"],
            BLOCK_N=config["rows_n"],
            BLOCK_K=config["rows_k"],
            TAIL_M=config["tail_m"],
            num_warps=config["rows_warps"],
            num_stages=config["rows_stages"],
        )
        _combine_kernel[(triton.cdiv(tokens, config["combine_t"]), triton.cdiv(hidden, config["combine_d"]))](
            dx_rows,
            scores,
            saved["inverse"],
            found["x"],
            tokens,
            K=top_k,
            D=hidden,
            WEIGHTED=False,
            BLOCK_T=config["combine_t"],
            BLOCK_D=config["combine_d"],
        )
        del dx_rows  # its memory serves the weight gradients
    if "down" in needs:
        found["down"] = torch.empty_like(down)
        if spec.transposed:
            _weight_grad(weighted_a, dy_rows, found["down"], saved, top_k, False, dy_rows is dy, config)
        else:
            _weight_grad(dy_rows, weighted_a, found["down"], saved, top_k, dy_rows is dy, False, config)
        del weighted_a, dy_rows
    if "gate_up" in needs:
        found["gate_up"] = torch.empty_like(gate_up)
        x_rows = x
        if config["weight_copy"]:
            x_rows = _spread(x, saved, experts, top_k, config)
        if spec.transposed:
            _weight_grad(x_rows, dh, found["gate_up"], saved, top_k, x_rows is x, False, config)
        else:
            _weight_grad(dh, x_rows, found["gate_up"], saved, top_k, False, x_rows is x, config)
    if spec.bias:
        if "gate_up_bias" in needs:
            found["gate_up_bias"] = torch.empty_like(tensors["gate_up_bias"])
            _bias_grad_kernel[(experts * triton.cdiv(2 * intermediate, config["bias_n"]),)](
                dh,
                scores,
                found["gate_up_bias"],
                saved["slot_of_row"],
                saved["offsets"],
                K=top_k,
                N=2 * intermediate,
                WEIGHTED=False,
                BLOCK_R=config["bias_r"],
                BLOCK_N=config["bias_n"],
            )
        if "down_bias" in needs:
            found["down_bias"] = torch.empty_like(tensors["down_bias"])
            _bias_grad_kernel[(experts * triton.cdiv(hidden, config["bias_n"]),)](
                dy,
                scores,
                found["down_bias"],
                saved["slot_of_row"],
                saved["offsets"],
                K=top_k,
                N=hidden,
                WEIGHTED=True,
                BLOCK_R=config["bias_r"],
                BLOCK_N=config["bias_n"],
            )
    return found


def longer(size, block, more):
    """``more`` if tiles of block + more cover ``size`` with no more padding than tiles of ``block``, else 0."""
    wide = block + more
    return more if triton.cdiv(size, wide) * wide <= triton.cdiv(size, block) * block else 0


def _weight_grad(left, right, out, saved, top_k, gather_left, gather_right, config):
    """out[e] = left^T right over the rows of e; a gathered operand is in token order.

    Tiles are longer by ``weight_more`` along the side where that adds nothing to compute.
    """
    experts, p, q = out.shape
    more_p, more_q = 0, longer(q, config["weight_q"], config["weight_more"])
    if more_q == 0:
        more_p = longer(p, config["weight_p"], config["weight_more"])
    grid = (experts * triton.cdiv(p, config["weight_p"] + more_p) * triton.cdiv(q, config["weight_q"] + more_q),)
    _weight_grad_kernel[grid](
        left,
        right,
        out,
        saved["slot_of_row"],
        saved["offsets"],
        K=top_k,
        P=p,
        Q=q,
        GATHER_LEFT=gather_left,
        GATHER_RIGHT=gather_right,
        BLOCK_P=config["weight_p"],
        BLOCK_Q=config["weight_q"],
        MORE_P=more_p,
        MORE_Q=more_q,
        BLOCK_R=config["weight_r"],
        num_warps=config["weight_warps"],
        num_stages=config["weight_stages"],
    )


def _spread(source, saved, experts, top_k, config):
    """The rows [R, D] of source [T, D] in sorted order."""
    slots, hidden = saved["slot_of_row"].shape[0], source.shape[1]
    rows = torch.empty((slots, hidden), dtype=source.dtype, device=source.device)
    _spread_kernel[(triton.cdiv(slots, config["spread_r"]), triton.cdiv(hidden, config["spread_d"]))](
        source,
        saved["slot_of_row"],
        saved["offsets"],
        rows,
        E=experts,
        K=top_k,
        D=hidden,
        BLOCK_R=config["spread_r"],
        BLOCK_D=config["spread_d"],
    )
    return rows
