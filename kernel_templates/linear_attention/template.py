"""Chunked linear attention with a decayed matrix state: Triton kernels and their host functions.

Tokens are cut into chunks of C; the recurrence runs over chunks, everything inside a chunk is matrix products. The
formulas of forward and backward, and why nothing overflows, are in the family's README. For a decay per channel:

    forward   prepare_kernel   norms, running decay; q and k times their decays
              gram_kernel      scores P = s tril(q k^T decayed) and solve M = (I + L)^-1 Diag(beta), per chunk
              scan_kernel      the state over chunks, cut over V; writes states and corrected values
              output_kernel    o
    backward  prepare_kernel and scan_kernel again, where their results were not kept
              reverse_kernel   the state's gradient over chunks, last to first; writes dv
              score_gradient_kernel    gradients of the two grams, of beta, and the row dots of the norms
              gradient_kernel  dq, dk, dg

A decay per head, or none, multiplies rows of the results, so that q and k feed every product as they were loaded:
head_gram_kernel does the work of the first two, head_gradient_kernel that of the last two.

Legend of tile names: T tokens of a program (C, or a span of several chunks), R tokens of a gram tile (half a chunk, or
a span), P tokens of q above those of k, K key channels, V value channels, 1 broadcast. ``at`` holds offsets, ``in``
masks.

All kernels but the two scans know no order between chunks: one program takes a *span* of consecutive chunks, whose
matrices are then the diagonal blocks of one tile. A GPU takes one chunk a program, the interpreter many.
"""

import torch
import triton
import triton.language as tl

# ---- where tokens lie ----------------------------------------------------------------------------------------------


@triton.jit
def span_of(chunks, span, length, per_sequence, SPAN: tl.constexpr, PACKED: tl.constexpr):
    """First token of a span, counted over all sequences (int64), and its number of tokens."""
    if PACKED:
        start = tl.load(chunks + 2 * span)
        tokens = tl.load(chunks + 2 * span + 1).to(tl.int32)
    else:
        first = (span % per_sequence) * SPAN
        start = (span // per_sequence).to(tl.int64) * length + first
        tokens = tl.minimum(length - first, SPAN)
    return start, tokens


@triton.jit
def sequence_of(cu_seqlens, offsets, sequence, length, per_sequence, PACKED: tl.constexpr):
    """A sequence's first chunk and number of chunks, and its first token (int64) and number of tokens."""
    if PACKED:
        first = tl.load(offsets + sequence).to(tl.int32)
        count = tl.load(offsets + sequence + 1).to(tl.int32) - first
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        tokens = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    else:
        first = sequence * per_sequence
        count = per_sequence
        start = sequence.to(tl.int64) * length
        tokens = length
    return first, count, start, tokens


@triton.jit
def tile_at(rows, stride, column, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Offsets and mask of a tile [R, W]: ``rows`` rows ``stride`` apart, WIDTH columns of them."""
    r_R1 = tl.arange(0, R)[:, None]
    c_1W = (column + tl.arange(0, W))[None, :]
    return r_R1 * stride + c_1W, (r_R1 < rows) & (c_1W < WIDTH)


@triton.jit
def transposed_at(rows, stride, column, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Offsets and mask of the transpose [W, R]: the first operand of a product must come straight from memory."""
    r_1R = tl.arange(0, R)[None, :]
    c_W1 = (column + tl.arange(0, W))[:, None]
    return r_1R * stride + c_W1, (r_1R < rows) & (c_W1 < WIDTH)


@triton.jit
def matrix_at(tokens, row, column, HV: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    """Offsets and mask of a block [R, R] of the chunks' matrices, which lie as [tokens, HV, C].

    With R > C the tile is square over a span: only its diagonal blocks exist.
    """
    i_R1 = row + tl.arange(0, R)[:, None]
    j_1R = column + tl.arange(0, R)[None, :]
    return i_R1 * (HV * C) + j_1R % C, (i_R1 < tokens) & (i_R1 // C == j_1R // C)


@triton.jit
def load_scalars(base, row, tokens, stride, R: tl.constexpr):
    """One fp32 value per token [R, 1]; zeros past the last token."""
    r_R1 = row + tl.arange(0, R)[:, None]
    return tl.load(base + r_R1 * stride, mask=r_R1 < tokens, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(base, x_R1, tokens, stride, R: tl.constexpr):
    """Write one value per token [R, 1]."""
    r_R1 = tl.arange(0, R)[:, None]
    tl.store(base + r_R1 * stride, x_R1.to(base.dtype.element_ty), mask=r_R1 < tokens)


@triton.jit
def load_vector(base, tokens, stride, R: tl.constexpr):
    """One fp32 value per token [R]; zeros past the last token."""
    r_R = tl.arange(0, R)
    return tl.load(base + r_R * stride, mask=r_R < tokens, other=0.0).to(tl.float32)


@triton.jit
def store_vector(base, x_R, tokens, stride, R: tl.constexpr):
    """Write one value per token [R]."""
    r_R = tl.arange(0, R)
    tl.store(base + r_R * stride, x_R.to(base.dtype.element_ty), mask=r_R < tokens)


@triton.jit
def cut(g):
    """A log decay as far as fp32 can tell: below -104, e^g is 0, and larger numbers would blur their neighbours."""
    return tl.maximum(g.to(tl.float32), -104.0)


@triton.jit
def row_sum(x_RW):
    """Sums of rows [R, 1]."""
    return tl.sum(x_RW, axis=1, keep_dims=True)


# ---- decays inside a tile ------------------------------------------------------------------------------------------


@triton.jit
def segment_sums(x_RW, SEGMENT: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Inside segments of rows: the sum from the segment's start through each row, and that past each row to its end."""
    if SEGMENT == R:
        through_RW = tl.cumsum(x_RW, axis=0)
        past_RW = tl.cumsum(x_RW, axis=0, reverse=True) - x_RW
    else:
        x_SRW = tl.reshape(x_RW, (R // SEGMENT, SEGMENT, W))
        through_RW = tl.reshape(tl.cumsum(x_SRW, axis=1), (R, W))
        past_RW = tl.reshape(tl.cumsum(x_SRW, axis=1, reverse=True), (R, W)) - x_RW
    return through_RW, past_RW


@triton.jit
def half_factor(g_RK, HALF: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Decay between each row and the middle of its block of 2 HALF rows: never above 1, so it cannot overflow.

    A row of the upper half gets e^(decay since the middle), a row of the lower half e^(decay up to the middle);
    their product is the decay between the two, exactly.
    """
    through_RK, past_RK = segment_sums(g_RK, HALF, R, W)
    upper_R1 = ((tl.arange(0, R) // HALF) % 2 == 1)[:, None]
    return tl.exp(tl.where(upper_R1, through_RK, past_RK))


@triton.jit
def half_mask(i_R1, j_1R, HALF: tl.constexpr):
    """Pairs (i, j) with i in the upper and j in the lower half of the same block of 2 HALF rows."""
    return (i_R1 // HALF == j_1R // HALF + 1) & ((i_R1 // HALF) % 2 == 1)


@triton.jit
def leaf_decay(g_RK, LEAF: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Log decay of each row relative to the middle row of its block of LEAF rows; within +-80.

    A step of more than 160 / LEAF is cut: what it hides is below e^(-160 / LEAF) of the diagonal.
    """
    g_SRK = tl.reshape(tl.maximum(g_RK, -160.0 / LEAF), (R // LEAF, LEAF, W))
    through_SRK = tl.cumsum(g_SRK, axis=1)
    to_middle_SRK = tl.where(tl.arange(0, LEAF)[None, :, None] <= LEAF // 2, g_SRK, 0.0)
    middle_S1K = tl.sum(to_middle_SRK, axis=1, keep_dims=True)
    return tl.reshape(through_SRK - middle_S1K, (R, W))


@triton.jit
def load_sums(decay_sums, row, tokens, column, HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Running sums of decays [R, W] from ``row`` on; past the last token the last one's, so that nothing overflows."""
    r_R1 = tl.minimum(row + tl.arange(0, R), tokens - 1)[:, None]
    c_1W = (column + tl.arange(0, W))[None, :]
    return tl.load(decay_sums + r_R1 * (HV * K) + c_1W, mask=c_1W < K, other=0.0)


@triton.jit
def highest_decay(highest, column, K: tl.constexpr, W: tl.constexpr):
    """The highest g of a chunk in W channels; one number is stored for every 32."""
    CHANNELS: tl.constexpr = min(W, 32)
    block_B = column // CHANNELS + tl.arange(0, W // CHANNELS)
    return tl.max(tl.load(highest + block_B, mask=block_B * CHANNELS < K, other=0.0))


@triton.jit
def lower_mask(i_R1, j_1R, SEGMENT: tl.constexpr):
    """Pairs (i, j), j before i, of the same segment of rows."""
    return (i_R1 // SEGMENT == j_1R // SEGMENT) & (i_R1 > j_1R)


@triton.jit
def vector_sums(x_R, SEGMENT: tl.constexpr, R: tl.constexpr):
    """:func:`segment_sums` of one value per row [R]; Triton cannot scan a tile one column wide."""
    x_SR = tl.reshape(x_R, (R // SEGMENT, SEGMENT))
    through_SR = tl.cumsum(x_SR, axis=1)
    past_SR = tl.cumsum(x_SR, axis=1, reverse=True) - x_SR
    return tl.reshape(through_SR, (R,)), tl.reshape(past_SR, (R,))


@triton.jit
def between_rows(g_R, i_P1, j_1R, mask_PR, TWICE: tl.constexpr, EXACT: tl.constexpr, R: tl.constexpr):
    """e^(g_{j+1} + ... + g_i) for the pairs j < i of ``mask``, 0 elsewhere; ``TWICE`` one below the other.

    Exact: a running sum for every j, because the difference of two running sums from the chunk's start would lose the
    small decay between two rows that a strong one precedes. bf16 bears it: it is wrong by 2^-24 of the larger sum.
    """
    if EXACT:
        steps_PR = tl.where(mask_PR, pair_of(g_R, g_R, TWICE, R)[:, None], 0.0)
        if TWICE:
            sums_PR = tl.reshape(tl.cumsum(tl.reshape(steps_PR, (2, R, R)), axis=1), (2 * R, R))
        else:
            sums_PR = tl.cumsum(steps_PR, axis=0)
    else:
        through_R = tl.cumsum(g_R, axis=0)
        sums_PR = pair_of(through_R, through_R, TWICE, R)[:, None] - through_R[None, :]
    return tl.where(mask_PR, tl.exp(sums_PR), 0.0)


@triton.jit
def pair_of(x_R, y_R, TWICE: tl.constexpr, R: tl.constexpr):
    """x, then y [2 R]; or x alone [R]."""
    if TWICE:
        pair_P = tl.reshape(tl.permute(tl.join(x_R, y_R), (1, 0)), (2 * R,))
    else:
        pair_P = x_R
    return pair_P


@triton.jit
def both_of(x_P, TWICE: tl.constexpr, R: tl.constexpr):
    """The two halves of a vector [2 R]; a vector [R] and zeros without the second."""
    if TWICE:
        x_R, y_R = tl.split(tl.permute(tl.reshape(x_P, (2, R)), (1, 0)))
    else:
        x_R = x_P
        y_R = tl.zeros([R], tl.float32)
    return x_R, y_R


@triton.jit
def inner_solve(a_RR, beta_R1, i_R1, j_1R, LOG_B: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr):
    """N with (I + Diag(beta) A)^-1 = I - Diag(beta) N, for a strictly lower A with blocks of 2^LOG_B rows, by doubling.

    Also I - N Diag(beta) and I - Diag(beta) N, the factors left and right of the next block below the diagonal: of
    two solved blocks, N_21 = (I - N_22 Diag(beta_2)) A_21 (I - Diag(beta_1) N_11). Neither N nor the factors shrink
    with beta, so that 16-bit operands serve a beta of any size.
    """
    unit_RR = tl.where(i_R1 == j_1R, 1.0, 0.0)
    beta_1R = tl.trans(beta_R1)
    n_RR = tl.where(half_mask(i_R1, j_1R, 1), a_RR, 0.0)
    for level in tl.static_range(1, LOG_B):
        step_RR = tl.where(half_mask(i_R1, j_1R, 1 << level), a_RR, 0.0).to(MMA)
        step_RR = tl.dot((unit_RR - n_RR * beta_1R).to(MMA), step_RR, input_precision=PRECISION)
        n_RR += tl.dot(step_RR.to(MMA), (unit_RR - beta_R1 * n_RR).to(MMA), input_precision=PRECISION)
    return n_RR, (unit_RR - n_RR * beta_1R).to(MMA), (unit_RR - beta_R1 * n_RR).to(MMA)


# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "per_sequence", "spans"])
def prepare_kernel(
    q, k, g, chunks, q_norm, k_norm, q_decayed, k_decayed, k_ending, chunk_decay, decay_sums, highest,
    scale, length, per_sequence, spans,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Norms of q and k, and both times their running decay in each chunk, for a decay per channel.

    q_decayed = s q e^G, k_decayed = k e^G, k_ending = k e^(G_C - G) [tokens, HV, K]; chunk_decay = e^G_C [chunks, HV,
    K].

    For bf16 in chunks of 64, decay_sums = G in fp32 [tokens, HV, K], so that gradient_kernel does not scan, and the
    highest g of 32 channels [chunks, HV, K / 32].
    """
    span = tl.program_id(0)
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = span_of(chunks, span, length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    if PACKED:
        chunk = span
        left = 1
    else:
        chunk = (span // spans) * per_sequence + (span % spans) * (SPAN // C)
        left = per_sequence - (span % spans) * (SPAN // C)
    chunk_head = chunk.to(tl.int64) * HV + hv
    token_head = start * HV + hv
    q_scale_T1 = tl.full([SPAN, 1], 1.0, tl.float32)
    k_scale_T1 = tl.full([SPAN, 1], 1.0, tl.float32)
    key = (start * H + h) * K
    if L2NORM:
        at_TP, in_TP = tile_at(tokens, H * K, 0, K, SPAN, KP)
        q_TP = tl.load(q + key + at_TP, mask=in_TP, other=0.0).to(tl.float32)
        k_TP = tl.load(k + key + at_TP, mask=in_TP, other=0.0).to(tl.float32)
        q_scale_T1 = 1.0 / tl.sqrt(row_sum(q_TP * q_TP) + 1e-6)
        k_scale_T1 = 1.0 / tl.sqrt(row_sum(k_TP * k_TP) + 1e-6)
        if hv % (HV // H) == 0:
            store_scalars(q_norm + start * H + h, q_scale_T1, tokens, H, SPAN)
            store_scalars(k_norm + start * H + h, k_scale_T1, tokens, H, SPAN)
    part_M1 = tl.arange(0, SPAN // C)[:, None]
    CHANNELS: tl.constexpr = min(BK, 32)
    for column in range(0, K, BK):
        at_TK, in_TK = tile_at(tokens, H * K, column, K, SPAN, BK)
        q_TK = tl.load(q + key + at_TK, mask=in_TK, other=0.0).to(tl.float32) * (q_scale_T1 * scale)
        k_TK = tl.load(k + key + at_TK, mask=in_TK, other=0.0).to(tl.float32) * k_scale_T1
        at_TK, in_TK = tile_at(tokens, HV * K, column, K, SPAN, BK)
        at_TK += token_head * K
        g_TK = cut(tl.load(g + at_TK, mask=in_TK, other=0.0))
        if q.dtype.element_ty == tl.bfloat16:
            g_MTK = tl.reshape(g_TK, (SPAN // C, C, BK))
            through_MTK = tl.cumsum(g_MTK, axis=1)
            past_TK = tl.reshape(tl.sum(g_MTK, axis=1, keep_dims=True) - through_MTK, (SPAN, BK))
            through_TK = tl.reshape(through_MTK, (SPAN, BK))
            if C == 64:
                tl.store(decay_sums + at_TK, through_TK, mask=in_TK)
                highest_MK = tl.max(g_MTK, axis=1)
                highest_MB = tl.max(tl.reshape(highest_MK, (SPAN // C, BK // CHANNELS, CHANNELS)), axis=2)
                block = column // CHANNELS + tl.arange(0, BK // CHANNELS)[None, :]
                at_MB = (chunk_head + part_M1 * HV) * tl.cdiv(K, CHANNELS) + block
                tl.store(highest + at_MB, highest_MB, mask=(part_M1 < left) & (block * CHANNELS < K))
        else:
            through_TK, past_TK = segment_sums(g_TK, C, SPAN, BK)
        through_TK = tl.exp(through_TK)
        tl.store(q_decayed + at_TK, (q_TK * through_TK).to(q_decayed.dtype.element_ty), mask=in_TK)
        tl.store(k_decayed + at_TK, (k_TK * through_TK).to(k_decayed.dtype.element_ty), mask=in_TK)
        tl.store(k_ending + at_TK, (k_TK * tl.exp(past_TK)).to(k_ending.dtype.element_ty), mask=in_TK)
        decay_MK = tl.exp(tl.sum(tl.reshape(g_TK, (SPAN // C, C, BK)), axis=1))
        c_1K = column + tl.arange(0, BK)[None, :]
        at_MK = (chunk_head + part_M1 * HV) * K + c_1K
        tl.store(chunk_decay + at_MK, decay_MK, mask=(part_M1 < left) & (c_1K < K))


@triton.jit
def load_normed(
    x, norm, row, tokens, column, H: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """A tile [R, W] of q or k in fp32, divided by its rows' norms where the operator normalises."""
    at_RW, in_RW = tile_at(tokens - row, H * K, column, K, R, W)
    x_RW = tl.load(x + row * (H * K) + at_RW, mask=in_RW, other=0.0).to(tl.float32)
    if L2NORM:
        x_RW *= load_scalars(norm, row, tokens, H, R)
    return x_RW


@triton.jit
def diagonal_grams(
    qk_RR, kk_RR, q_RK, k_RK, g_RK, i_R1, j_1R,
    DELTA: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
    LEAF: tl.constexpr, LOG_LEAF: tl.constexpr, LOG_B: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds to q k^T and k k^T, below the diagonal, what these channels contribute in blocks of 2^LOG_B rows."""
    for level in tl.static_range(LOG_LEAF, LOG_B):
        factor_RK = half_factor(g_RK, 1 << level, R, W)
        mask_RR = half_mask(i_R1, j_1R, 1 << level)
        near_RK = (k_RK * factor_RK).to(MMA)
        far_KR = tl.trans(near_RK)
        part_RR = tl.dot((q_RK * factor_RK).to(MMA), far_KR, input_precision=PRECISION)
        qk_RR += tl.where(mask_RR, part_RR, 0.0)
        if DELTA:
            kk_RR += tl.where(mask_RR, tl.dot(near_RK, far_KR, input_precision=PRECISION), 0.0)
    if LEAF > 1:
        decay_RK = leaf_decay(g_RK, LEAF, R, W)
        rise_RK = tl.exp(decay_RK)
        far_KR = tl.trans((k_RK * tl.exp(-decay_RK)).to(MMA))
        mask_RR = lower_mask(i_R1, j_1R, LEAF)
        part_RR = tl.dot((q_RK * rise_RK).to(MMA), far_KR, input_precision=PRECISION)
        qk_RR += tl.where(mask_RR, part_RR, 0.0)
        if DELTA:
            part_RR = tl.dot((k_RK * rise_RK).to(MMA), far_KR, input_precision=PRECISION)
            kk_RR += tl.where(mask_RR, part_RR, 0.0)
    return qk_RR, kk_RR


@triton.jit
def store_matrix(base, x_RR, tokens, row, column, HV: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    """Write a block [R, R] of the chunks' matrices."""
    at_RR, in_RR = matrix_at(tokens, row, column, HV, C, R)
    tl.store(base + at_RR, x_RR.to(base.dtype.element_ty), mask=in_RR)


@triton.jit
def store_solved(
    solve, n_RR, beta_R1, tokens, row, i_R1, j_1R, HV: tl.constexpr, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Write M = Diag(beta) - Diag(beta) N Diag(beta), a block on the diagonal."""
    m_RR = tl.where(i_R1 == j_1R, beta_R1, 0.0) - beta_R1 * n_RR * tl.trans(beta_R1)
    store_matrix(solve, m_RR, tokens, row, row, HV, C, R)


@triton.jit
def load_beta(beta, row, tokens, stride, floor, R: tl.constexpr):
    """beta [R, 1], kept off 0 so that its gradient, a quotient of two multiples of beta, exists there too."""
    beta_R1 = load_scalars(beta, row, tokens, stride, R)
    beta_R1 = tl.where(tl.abs(beta_R1) < floor, floor, beta_R1)
    return tl.where(row + tl.arange(0, R)[:, None] < tokens, beta_R1, 0.0)


@triton.jit(do_not_specialize=["length", "spans"])
def gram_kernel(
    q, k, g, beta, chunks, q_norm, k_norm, scores, solve, scale, beta_floor, length, spans,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, LOG_B: tl.constexpr,
    LEAF: tl.constexpr, LOG_LEAF: tl.constexpr, BK: tl.constexpr,
    DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and M = (I + L)^-1 Diag(beta) [C, C] of one head and one chunk (in two halves) or span, decay per channel.

    P_ij = s sum_c q_ic k_jc e^(G_ic - G_jc) for i >= j;  L_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc) for i > j.
    """
    HALVES: tl.constexpr = C > R
    SPAN: tl.constexpr = C if HALVES else R
    # keys of length 1 keep the inverse within fp16, whose mantissa is tf32's at twice the rate
    SOLVE: tl.constexpr = tl.float16 if (L2NORM & (LEAF == 16)) else tl.float32
    WIDE: tl.constexpr = HALVES & (LEAF == 16)
    MMA: tl.constexpr = q.dtype.element_ty
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = span_of(chunks, tl.program_id(0), length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    q += (start * H + h) * K
    k += (start * H + h) * K
    if L2NORM:
        q_norm += start * H + h
        k_norm += start * H + h
    token_head = start * HV + hv
    scores += token_head * C
    g += token_head * K
    i_R1 = tl.arange(0, R)[:, None]
    j_1R = tl.arange(0, R)[None, :]
    qk0_RR = tl.zeros([R, R], tl.float32)
    kk0_RR = tl.zeros([R, R], tl.float32)
    own0_R1 = tl.zeros([R, 1], tl.float32)
    if HALVES:
        qk1_RR = tl.zeros([R, R], tl.float32)
        kk1_RR = tl.zeros([R, R], tl.float32)
        qk10_RR = tl.zeros([R, R], tl.float32)
        kk10_RR = tl.zeros([R, R], tl.float32)
        own1_R1 = tl.zeros([R, 1], tl.float32)
    for column in range(0, K, BK):
        q0_RK = load_normed(q, q_norm, 0, tokens, column, H, K, L2NORM, R, BK)
        k0_RK = load_normed(k, k_norm, 0, tokens, column, H, K, L2NORM, R, BK)
        own0_R1 += row_sum(q0_RK * k0_RK)
        g0_RK = cut(load_normed(g, g, 0, tokens, column, HV, K, False, R, BK))
        if HALVES:
            q1_RK = load_normed(q, q_norm, R, tokens, column, H, K, L2NORM, R, BK)
            k1_RK = load_normed(k, k_norm, R, tokens, column, H, K, L2NORM, R, BK)
            own1_R1 += row_sum(q1_RK * k1_RK)
            g1_RK = cut(load_normed(g, g, R, tokens, column, HV, K, False, R, BK))
        if WIDE:
            through0_RK = tl.cumsum(g0_RK, axis=0)
            through1_RK = tl.cumsum(g1_RK, axis=0)
            middle0_1K = tl.sum(tl.where(i_R1 < R // 2, g0_RK, 0.0), axis=0, keep_dims=True)
            middle1_1K = tl.sum(tl.where(i_R1 < R // 2, g1_RK, 0.0), axis=0, keep_dims=True)
            total0_1K = tl.sum(g0_RK, axis=0, keep_dims=True)
            magnitude_2K = tl.maximum(
                tl.sum(tl.abs(tl.reshape(g0_RK, (2, R // 2, BK))), axis=1),
                tl.sum(tl.abs(tl.reshape(g1_RK, (2, R // 2, BK))), axis=1),
            )
            if tl.max(magnitude_2K) <= 80.0:
                log_RK = through0_RK - middle0_1K
                rise_RK = tl.exp(log_RK)
                far_KR = tl.trans((k0_RK * tl.exp(-log_RK)).to(MMA))
                qk0_RR += tl.dot((q0_RK * rise_RK).to(MMA), far_KR)
                if DELTA:
                    kk0_RR += tl.dot((k0_RK * rise_RK).to(MMA), far_KR)
                log_RK = through1_RK - middle1_1K
                rise_RK = tl.exp(log_RK)
                far_KR = tl.trans((k1_RK * tl.exp(-log_RK)).to(MMA))
                qk1_RR += tl.dot((q1_RK * rise_RK).to(MMA), far_KR)
                if DELTA:
                    kk1_RR += tl.dot((k1_RK * rise_RK).to(MMA), far_KR)
            else:
                qk0_RR, kk0_RR = diagonal_grams(
                    qk0_RR, kk0_RR, q0_RK, k0_RK, g0_RK, i_R1, j_1R, DELTA, MMA, PRECISION, LEAF, LOG_LEAF,
                    LOG_B, R, BK,
                )  # fmt: skip
                qk1_RR, kk1_RR = diagonal_grams(
                    qk1_RR, kk1_RR, q1_RK, k1_RK, g1_RK, i_R1, j_1R, DELTA, MMA, PRECISION, LEAF, LOG_LEAF,
                    LOG_B, R, BK,
                )  # fmt: skip
            since_RK = tl.exp(through1_RK)
            far_KR = tl.trans((k0_RK * tl.exp(total0_1K - through0_RK)).to(MMA))
            qk10_RR += tl.dot((q1_RK * since_RK).to(MMA), far_KR)
            if DELTA:
                kk10_RR += tl.dot((k1_RK * since_RK).to(MMA), far_KR)
        else:
            qk0_RR, kk0_RR = diagonal_grams(
                qk0_RR, kk0_RR, q0_RK, k0_RK, g0_RK, i_R1, j_1R, DELTA, MMA, PRECISION, LEAF, LOG_LEAF, LOG_B,
                R, BK,
            )  # fmt: skip
            if HALVES:
                qk1_RR, kk1_RR = diagonal_grams(
                    qk1_RR, kk1_RR, q1_RK, k1_RK, g1_RK, i_R1, j_1R, DELTA, MMA, PRECISION, LEAF, LOG_LEAF,
                    LOG_B, R, BK,
                )  # fmt: skip
                # both halves relative to the boundary between them
                since_RK = tl.exp(tl.cumsum(g1_RK, axis=0))
                q1_RK *= since_RK
                k1_RK *= since_RK
                k0_RK *= tl.exp(tl.cumsum(g0_RK, axis=0, reverse=True) - g0_RK)
                far_KR = tl.trans(k0_RK.to(MMA))
                qk10_RR += tl.dot(q1_RK.to(MMA), far_KR, input_precision=PRECISION)
                if DELTA:
                    kk10_RR += tl.dot(k1_RK.to(MMA), far_KR, input_precision=PRECISION)

    below_RR = lower_mask(i_R1, j_1R, C)
    own_RR = tl.where(i_R1 == j_1R, own0_R1, 0.0)
    store_matrix(scores, (tl.where(below_RR, qk0_RR, 0.0) + own_RR) * scale, tokens, 0, 0, HV, C, R)
    if HALVES:
        own_RR = tl.where(i_R1 == j_1R, own1_R1, 0.0)
        store_matrix(scores, (tl.where(below_RR, qk1_RR, 0.0) + own_RR) * scale, tokens, R, R, HV, C, R)
        store_matrix(scores, qk10_RR * scale, tokens, R, 0, HV, C, R)
        store_matrix(scores, tl.zeros([R, R], tl.float32), tokens, 0, R, HV, C, R)
    if DELTA:
        solve += token_head * C
        beta += token_head
        beta0_R1 = load_beta(beta, 0, tokens, HV, beta_floor, R)
        a_RR = tl.where(below_RR, kk0_RR, 0.0)
        n_RR, _, right_RR = inner_solve(a_RR, beta0_R1, i_R1, j_1R, LOG_B, SOLVE, PRECISION)
        store_solved(solve, n_RR, beta0_R1, tokens, 0, i_R1, j_1R, HV, C, R)
        if HALVES:
            beta1_R1 = load_beta(beta, R, tokens, HV, beta_floor, R)
            a_RR = tl.where(below_RR, kk1_RR, 0.0)
            n_RR, left_RR, _ = inner_solve(a_RR, beta1_R1, i_R1, j_1R, LOG_B, SOLVE, PRECISION)
            store_solved(solve, n_RR, beta1_R1, tokens, R, i_R1, j_1R, HV, C, R)
            n_RR = tl.dot(left_RR, kk10_RR.to(SOLVE), input_precision=PRECISION)
            n_RR = tl.dot(n_RR.to(SOLVE), right_RR, input_precision=PRECISION)
            store_matrix(solve, -beta1_R1 * n_RR * tl.trans(beta0_R1), tokens, R, 0, HV, C, R)
            store_matrix(solve, tl.zeros([R, R], tl.float32), tokens, 0, R, HV, C, R)


@triton.jit(do_not_specialize=["length", "per_sequence", "spans"])
def head_gram_kernel(
    q, k, g, beta, chunks, q_norm, k_norm, q_rows, k_rows, end_rows, chunk_decay, scores, solve,
    scale, beta_floor, length, per_sequence, spans,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, KP: tl.constexpr,
    LOG_B: tl.constexpr, LEAF: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For a decay per head or none: P, M [C, C], norms, and the factors that carry the decays, of one head and span.

    Both grams are one product [q; k] k^T of the tiles as they were loaded, whose rows and columns take norms and decays
    afterwards. Factors of rows, [tokens, HV]: q_rows = s e^G / |q|, k_rows = e^G / |k|, end_rows = e^(G_C - G) / |k|;
    chunk_decay = e^G_C [chunks, HV].
    """
    # keys of length 1 keep the inverse within fp16, whose mantissa is tf32's at twice the rate
    SOLVE: tl.constexpr = tl.float16 if (L2NORM & (LEAF == 16)) else tl.float32
    PAIR: tl.constexpr = 2 if DELTA else 1
    HALVES: tl.constexpr = (1 << LOG_B) < C
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = span_of(chunks, tl.program_id(0), length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    if PACKED:
        chunk = tl.program_id(0)
        left = 1
    else:
        place = tl.program_id(0) % spans * (SPAN // C)
        chunk = tl.program_id(0) // spans * per_sequence + place
        left = per_sequence - place
    token_head = start * HV + hv
    r_P1 = tl.arange(0, PAIR * SPAN)[:, None]
    i_P1 = r_P1 % SPAN
    j_1T = tl.arange(0, SPAN)[None, :]
    c_1K = tl.arange(0, KP)[None, :]
    at_PK = (start * H + h) * K + i_P1 * (H * K) + c_1K
    qk_PK = tl.load(tl.where(r_P1 < SPAN, q + at_PK, k + at_PK), mask=(i_P1 < tokens) & (c_1K < K), other=0.0)
    at_TK, in_TK = tile_at(tokens, H * K, 0, K, SPAN, KP)
    k_TK = tl.load(k + (start * H + h) * K + at_TK, mask=in_TK, other=0.0)
    q_scale_T = tl.full([SPAN], 1.0, tl.float32)
    k_scale_T = tl.full([SPAN], 1.0, tl.float32)
    if L2NORM:
        wide_PK = qk_PK.to(tl.float32)
        q_scale_T, k_scale_T = both_of(1.0 / tl.sqrt(tl.sum(wide_PK * wide_PK, axis=1) + 1e-6), DELTA, SPAN)
        if not DELTA:
            wide_TK = k_TK.to(tl.float32)
            k_scale_T = 1.0 / tl.sqrt(tl.sum(wide_TK * wide_TK, axis=1) + 1e-6)
        if hv % (HV // H) == 0:
            store_vector(q_norm + start * H + h, q_scale_T, tokens, H, SPAN)
            store_vector(k_norm + start * H + h, k_scale_T, tokens, H, SPAN)
    gram_PT = tl.dot(qk_PK, tl.trans(k_TK), input_precision=PRECISION)
    gram_PT *= pair_of(q_scale_T, k_scale_T, DELTA, SPAN)[:, None] * k_scale_T[None, :]
    below_PT = lower_mask(i_P1, j_1T, C)
    through_T = tl.full([SPAN], 1.0, tl.float32)
    past_T = tl.full([SPAN], 1.0, tl.float32)
    between_PT = tl.where(below_PT, 1.0, 0.0)
    if DECAY == "head":
        g_T = cut(load_vector(g + token_head, tokens, HV, SPAN))
        between_PT = between_rows(g_T, i_P1, j_1T, below_PT, DELTA, LEAF == 1, SPAN)
        through_T, past_T = vector_sums(g_T, C, SPAN)
        through_T = tl.exp(through_T)
        past_T = tl.exp(past_T)
        part_M = tl.arange(0, SPAN // C)
        decay_M = tl.exp(tl.sum(tl.reshape(g_T, (SPAN // C, C)), axis=1))
        tl.store(chunk_decay + (chunk.to(tl.int64) + part_M) * HV + hv, decay_M, mask=part_M < left)
    store_vector(q_rows + token_head, q_scale_T * through_T * scale, tokens, HV, SPAN)
    store_vector(k_rows + token_head, k_scale_T * through_T, tokens, HV, SPAN)
    store_vector(end_rows + token_head, k_scale_T * past_T, tokens, HV, SPAN)
    score_PT = gram_PT * (between_PT + tl.where(i_P1 == j_1T, 1.0, 0.0)) * scale
    at_PT = token_head * C + i_P1 * (HV * C) + j_1T % C
    in_PT = (i_P1 < tokens) & (i_P1 // C == j_1T // C) & (r_P1 < SPAN)
    tl.store(scores + at_PT, score_PT.to(scores.dtype.element_ty), mask=in_PT)
    if DELTA:
        solve += token_head * C
        beta += token_head
        a_PT = gram_PT * between_PT
        _, a_TT = tl.split(tl.permute(tl.reshape(a_PT, (2, SPAN, SPAN)), (1, 2, 0)))
        if HALVES:
            R: tl.constexpr = C // 2
            i_R1 = tl.arange(0, R)[:, None]
            j_1R = tl.arange(0, R)[None, :]
            left_RR2, right_RR2 = tl.split(tl.permute(tl.reshape(a_TT, (2, R, 2, R)), (1, 3, 0, 2)))
            a0_RR, a10_RR = tl.split(left_RR2)
            _, a1_RR = tl.split(right_RR2)
            beta0_R1 = load_beta(beta, 0, tokens, HV, beta_floor, R)
            beta1_R1 = load_beta(beta, R, tokens, HV, beta_floor, R)
            n_RR, _, right_RR = inner_solve(a0_RR, beta0_R1, i_R1, j_1R, LOG_B, SOLVE, PRECISION)
            store_solved(solve, n_RR, beta0_R1, tokens, 0, i_R1, j_1R, HV, C, R)
            n_RR, left_RR, _ = inner_solve(a1_RR, beta1_R1, i_R1, j_1R, LOG_B, SOLVE, PRECISION)
            store_solved(solve, n_RR, beta1_R1, tokens, R, i_R1, j_1R, HV, C, R)
            n_RR = tl.dot(left_RR, a10_RR.to(SOLVE), input_precision=PRECISION)
            n_RR = tl.dot(n_RR.to(SOLVE), right_RR, input_precision=PRECISION)
            store_matrix(solve, -beta1_R1 * n_RR * tl.trans(beta0_R1), tokens, R, 0, HV, C, R)
            store_matrix(solve, tl.zeros([R, R], tl.float32), tokens, 0, R, HV, C, R)
        else:
            i_T1 = tl.arange(0, SPAN)[:, None]
            beta_T1 = load_beta(beta, 0, tokens, HV, beta_floor, SPAN)
            n_TT, _, _ = inner_solve(a_TT, beta_T1, i_T1, j_1T, LOG_B, SOLVE, PRECISION)
            store_solved(solve, n_TT, beta_T1, tokens, 0, i_T1, j_1T, HV, C, SPAN)


@triton.jit(do_not_specialize=["length", "per_sequence"])
def scan_kernel(
    q, k, v, q_decayed, k_decayed, k_ending, q_rows, k_rows, end_rows, chunk_decay, scores, solve,
    initial_state, final_state, states, values, o, cu_seqlens, offsets, length, per_sequence,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    OUTPUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state over the chunks of one sequence, for one head and slice of V.

    V' = M (v - k_decayed S);  S <- e^G_C S + k_ending^T V'. Writes every chunk's starting state, V' (with the delta
    rule; else it is v) and the final state. OUTPUT: and o = q_decayed S + P V', where shared memory has room for its
    operands beside those of the chain from one state to the next; else output_kernel makes it.
    """
    slices = tl.cdiv(V, BV)
    v_column = (tl.program_id(0) % slices) * BV
    hv = (tl.program_id(0) // slices) % HV
    sequence = tl.program_id(0) // slices // HV
    h = hv // (HV // H)
    MMA: tl.constexpr = k.dtype.element_ty
    first, count, begin, total = sequence_of(cu_seqlens, offsets, sequence, length, per_sequence, PACKED)
    at_KV, in_KV = tile_at(K, V, v_column, V, KP, BV)
    state_base = (sequence.to(tl.int64) * HV + hv) * K * V
    state_KV = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        state_KV += tl.load(initial_state + state_base + at_KV, mask=in_KV, other=0.0)
    KEY_HEADS: tl.constexpr = HV if DECAY == "channel" else H
    at_TK, _ = tile_at(C, KEY_HEADS * K, 0, K, C, KP)
    at_KT, _ = transposed_at(C, KEY_HEADS * K, 0, K, C, KP)
    at_TV, _ = tile_at(C, HV * V, v_column, V, C, BV)
    at_TT, _ = tile_at(C, HV * C, 0, C, C, C)
    i_T1 = tl.arange(0, C)[:, None]
    j_1T = tl.arange(0, C)[None, :]
    c_K1 = tl.arange(0, KP)[:, None]
    in_K1 = c_K1 < K
    in_1K = tl.arange(0, KP)[None, :] < K
    in_1V = v_column + tl.arange(0, BV)[None, :] < V
    for step in range(0, count):
        start = begin + step * C
        tokens = tl.minimum(total - step * C, C)
        chunk_head = (first + step).to(tl.int64) * HV + hv
        token_head = start * HV + hv
        key = token_head * K
        if DECAY != "channel":
            key = (start * H + h) * K
        here_T1 = i_T1 < tokens
        in_TK = here_T1 & in_1K
        in_TV = here_T1 & in_1V
        in_KT = in_K1 & (j_1T < tokens)
        # what is needed last is asked for first: only operands of products are fetched an iteration ahead
        if DECAY == "channel":
            decay_K1 = tl.load(chunk_decay + chunk_head * K + c_K1, mask=in_K1, other=0.0)
        else:
            end_T1 = load_scalars(end_rows + token_head, 0, tokens, HV, C)
            if DELTA:
                k_row_T1 = load_scalars(k_rows + token_head, 0, tokens, HV, C)
            if DECAY == "head":
                decay = tl.load(chunk_decay + chunk_head)
            if OUTPUT:
                q_row_T1 = load_scalars(q_rows + token_head, 0, tokens, HV, C)
            k_TK = tl.load(k + key + at_TK, mask=in_TK, other=0.0)
        narrow_KV = state_KV.to(MMA)
        new_TV = tl.load(v + token_head * V + at_TV, mask=in_TV, other=0.0)
        tl.store(states + chunk_head * K * V + at_KV, narrow_KV, mask=in_KV)
        if DELTA:
            if DECAY == "channel":
                k_TK = tl.load(k_decayed + key + at_TK, mask=in_TK, other=0.0)
                known_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION)
            else:
                known_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION) * k_row_T1
            solve_TT = tl.load(solve + token_head * C + at_TT, mask=here_T1, other=0.0)
            new_TV = tl.dot(solve_TT, (new_TV - known_TV).to(MMA), input_precision=PRECISION)
        new_narrow_TV = new_TV.to(MMA)
        if OUTPUT:
            if DECAY == "channel":
                q_TK = tl.load(q_decayed + key + at_TK, mask=in_TK, other=0.0)
                o_TV = tl.dot(q_TK, narrow_KV, input_precision=PRECISION)
            else:
                q_TK = tl.load(q + key + at_TK, mask=in_TK, other=0.0)
                o_TV = tl.dot(q_TK, narrow_KV, input_precision=PRECISION) * q_row_T1
            score_TT = tl.load(scores + token_head * C + at_TT, mask=here_T1, other=0.0)
            o_TV += tl.dot(score_TT, new_narrow_TV, input_precision=PRECISION)
            tl.store(o + token_head * V + at_TV, o_TV.to(o.dtype.element_ty), mask=in_TV)
        if DELTA:
            tl.store(values + token_head * V + at_TV, new_narrow_TV, mask=in_TV)
        if DECAY == "channel":
            state_KV *= decay_K1
            k_KT = tl.load(k_ending + key + at_KT, mask=in_KT, other=0.0)
            state_KV += tl.dot(k_KT, new_narrow_TV, input_precision=PRECISION)
        else:
            if DECAY == "head":
                state_KV *= decay
            state_KV += tl.dot(tl.trans(k_TK), (new_TV * end_T1).to(MMA), input_precision=PRECISION)
    tl.store(final_state + state_base + at_KV, state_KV, mask=in_KV)


@triton.jit(do_not_specialize=["length", "per_sequence", "spans"])
def output_kernel(
    q, q_decayed, q_rows, states, values, scores, o, chunks, length, per_sequence, spans,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = q_decayed S + P V' of one span, head and slice of V."""
    slices = tl.cdiv(V, BV)
    span = tl.program_id(0) // slices
    v_column = (tl.program_id(0) % slices) * BV
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = span_of(chunks, span, length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    first_chunk = span
    if not PACKED:
        first_chunk = (span // spans) * per_sequence + (span % spans) * (SPAN // C)
    MMA: tl.constexpr = q.dtype.element_ty
    token_head = start * HV + hv
    at_TV, in_TV = tile_at(tokens, HV * V, v_column, V, SPAN, BV)
    at_KV, in_KV = tile_at(K, V, v_column, V, KP, BV)
    i_T1 = tl.arange(0, SPAN)[:, None]
    o_TV = tl.zeros([SPAN, BV], tl.float32)
    for part in tl.static_range(SPAN // C):
        state = states + ((first_chunk + part).to(tl.int64) * HV + hv) * K * V
        state_KV = tl.load(state + at_KV, mask=in_KV & (part * C < tokens), other=0.0)
        if DECAY == "channel":
            at_TK, in_TK = tile_at(tokens, HV * K, 0, K, SPAN, KP)
            q_TK = tl.load(q_decayed + token_head * K + at_TK, mask=in_TK & (i_T1 // C == part), other=0.0)
        else:
            at_TK, in_TK = tile_at(tokens, H * K, 0, K, SPAN, KP)
            q_TK = tl.load(q + (start * H + h) * K + at_TK, mask=in_TK & (i_T1 // C == part), other=0.0)
        o_TV += tl.dot(q_TK, state_KV, input_precision=PRECISION)
    if DECAY != "channel":
        o_TV *= load_scalars(q_rows + token_head, 0, tokens, HV, SPAN)
    at_TT, in_TT = matrix_at(tokens, 0, 0, HV, C, SPAN)
    score_TT = tl.load(scores + token_head * C + at_TT, mask=in_TT, other=0.0)
    new_TV = tl.load(values + token_head * V + at_TV, mask=in_TV, other=0.0).to(MMA)
    o_TV += tl.dot(score_TT, new_TV, input_precision=PRECISION)
    tl.store(o + token_head * V + at_TV, o_TV.to(o.dtype.element_ty), mask=in_TV)


# ---- backward ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "per_sequence"])
def reverse_kernel(
    q, k, q_decayed, k_decayed, k_ending, q_rows, k_rows, end_rows, chunk_decay, scores, solve, grad_o, grad_final,
    grad_v, grad_states, grad_initial, cu_seqlens, offsets, length, per_sequence,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state over the chunks of one sequence, last to first, for one head and slice of V.

    dV' = P^T dO + k_ending dS;  dv = M^T dV';  dS <- e^G_C dS + q_decayed^T dO - k_decayed^T dv. Needs no forward
    state. Writes dv and, per chunk, the gradient of the state that the chunk leaves.
    """
    slices = tl.cdiv(V, BV)
    v_column = (tl.program_id(0) % slices) * BV
    hv = (tl.program_id(0) // slices) % HV
    sequence = tl.program_id(0) // slices // HV
    h = hv // (HV // H)
    MMA: tl.constexpr = q.dtype.element_ty
    first, count, begin, total = sequence_of(cu_seqlens, offsets, sequence, length, per_sequence, PACKED)
    at_KV, in_KV = tile_at(K, V, v_column, V, KP, BV)
    state_base = (sequence.to(tl.int64) * HV + hv) * K * V
    grad_KV = tl.zeros([KP, BV], tl.float32)
    if FINAL:
        grad_KV += tl.load(grad_final + state_base + at_KV, mask=in_KV, other=0.0)
    KEY_HEADS: tl.constexpr = HV if DECAY == "channel" else H
    at_TK, _ = tile_at(C, KEY_HEADS * K, 0, K, C, KP)
    at_KT, _ = transposed_at(C, KEY_HEADS * K, 0, K, C, KP)
    at_TV, _ = tile_at(C, HV * V, v_column, V, C, BV)
    at_TT, _ = transposed_at(C, HV * C, 0, C, C, C)
    i_T1 = tl.arange(0, C)[:, None]
    j_1T = tl.arange(0, C)[None, :]
    c_K1 = tl.arange(0, KP)[:, None]
    in_K1 = c_K1 < K
    in_1K = tl.arange(0, KP)[None, :] < K
    in_1V = v_column + tl.arange(0, BV)[None, :] < V
    for step in range(0, count):
        index = count - 1 - step
        start = begin + index * C
        tokens = tl.minimum(total - index * C, C)
        chunk_head = (first + index).to(tl.int64) * HV + hv
        token_head = start * HV + hv
        key = token_head * K
        if DECAY != "channel":
            key = (start * H + h) * K
        here_T1 = i_T1 < tokens
        here_1T = j_1T < tokens
        in_TK = here_T1 & in_1K
        in_TV = here_T1 & in_1V
        in_KT = in_K1 & here_1T
        # what is needed last is asked for first: only operands of products are fetched an iteration ahead
        if DECAY == "channel":
            decay_K1 = tl.load(chunk_decay + chunk_head * K + c_K1, mask=in_K1, other=0.0)
        else:
            end_T1 = load_scalars(end_rows + token_head, 0, tokens, HV, C)
            q_row_T1 = load_scalars(q_rows + token_head, 0, tokens, HV, C)
            if DELTA:
                k_row_T1 = load_scalars(k_rows + token_head, 0, tokens, HV, C)
            if DECAY == "head":
                decay = tl.load(chunk_decay + chunk_head)
        narrow_KV = grad_KV.to(MMA)
        tl.store(grad_states + chunk_head * K * V + at_KV, narrow_KV, mask=in_KV)
        do_TV = tl.load(grad_o + token_head * V + at_TV, mask=in_TV, other=0.0)
        if DECAY == "channel":
            k_TK = tl.load(k_ending + key + at_TK, mask=in_TK, other=0.0)
            dv_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION)
        else:
            k_TK = tl.load(k + key + at_TK, mask=in_TK, other=0.0)
            dv_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION)
            dv_TV *= end_T1
        score_TT = tl.load(scores + token_head * C + at_TT, mask=here_1T, other=0.0)
        dv_TV += tl.dot(score_TT, do_TV.to(MMA), input_precision=PRECISION)
        if DELTA:
            solve_TT = tl.load(solve + token_head * C + at_TT, mask=here_1T, other=0.0)
            dv_TV = tl.dot(solve_TT, dv_TV.to(MMA), input_precision=PRECISION)
        tl.store(grad_v + token_head * V + at_TV, dv_TV.to(grad_v.dtype.element_ty), mask=in_TV)
        if DECAY == "channel":
            grad_KV *= decay_K1
            q_KT = tl.load(q_decayed + key + at_KT, mask=in_KT, other=0.0)
            grad_KV += tl.dot(q_KT, do_TV.to(MMA), input_precision=PRECISION)
            if DELTA:
                k_KT = tl.load(k_decayed + key + at_KT, mask=in_KT, other=0.0)
                grad_KV -= tl.dot(k_KT, dv_TV.to(MMA), input_precision=PRECISION)
        else:
            if DECAY == "head":
                grad_KV *= decay
            q_KT = tl.load(q + key + at_KT, mask=in_KT, other=0.0)
            grad_KV += tl.dot(q_KT, (do_TV * q_row_T1).to(MMA), input_precision=PRECISION)
            if DELTA:
                grad_KV -= tl.dot(tl.trans(k_TK), (dv_TV * k_row_T1).to(MMA), input_precision=PRECISION)
    if INITIAL:
        tl.store(grad_initial + state_base + at_KV, grad_KV.to(grad_initial.dtype.element_ty), mask=in_KV)


@triton.jit(do_not_specialize=["length", "spans"])
def score_gradient_kernel(
    v, beta, o, values, grad_o, grad_v, grad_scores, grad_solve, own_grads, q_dots, k_dots, grad_beta,
    chunks, scale, beta_floor, length, spans,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the two grams of one head and span, strictly below the diagonal, and of beta; decay per channel.

    grad_scores = s dO V'^T, grad_solve = -dv V'^T. The diagonal of the first is kept apart in fp32 (own_grads): it has
    no part in dg, and would drown it. With a norm, q . dq = dO . o and k . dk = 2 beta dbeta - dv . v come from here,
    because later the channels are cut.
    """
    hv = tl.program_id(1)
    start, tokens = span_of(chunks, tl.program_id(0), length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    token_head = start * HV + hv
    MMA: tl.constexpr = grad_scores.dtype.element_ty
    dscore_TT = tl.zeros([SPAN, SPAN], tl.float32)
    dsolve_TT = tl.zeros([SPAN, SPAN], tl.float32)
    own_T1 = tl.zeros([SPAN, 1], tl.float32)
    dv_new_T1 = tl.zeros([SPAN, 1], tl.float32)
    dv_v_T1 = tl.zeros([SPAN, 1], tl.float32)
    do_o_T1 = tl.zeros([SPAN, 1], tl.float32)
    for v_column in range(0, V, BV):
        at_TV, in_TV = tile_at(tokens, HV * V, v_column, V, SPAN, BV)
        at_TV += token_head * V
        at_VT, in_VT = transposed_at(tokens, HV * V, v_column, V, SPAN, BV)
        do_TV = tl.load(grad_o + at_TV, mask=in_TV, other=0.0).to(MMA)
        new_TV = tl.load(values + at_TV, mask=in_TV, other=0.0).to(tl.float32)
        new_VT = tl.load(values + token_head * V + at_VT, mask=in_VT, other=0.0).to(MMA)
        dscore_TT += tl.dot(do_TV, new_VT, input_precision=PRECISION)
        own_T1 += row_sum(do_TV * new_TV)
        if DELTA or L2NORM:
            dv_TV = tl.load(grad_v + at_TV, mask=in_TV, other=0.0).to(MMA)
        if DELTA:
            dsolve_TT -= tl.dot(dv_TV, new_VT, input_precision=PRECISION)
            dv_new_T1 += row_sum(dv_TV * new_TV)
        if L2NORM:
            v_TV = tl.load(v + at_TV, mask=in_TV, other=0.0).to(tl.float32)
            o_TV = tl.load(o + at_TV, mask=in_TV, other=0.0).to(tl.float32)
            dv_v_T1 += row_sum(dv_TV * v_TV)
            do_o_T1 += row_sum(do_TV * o_TV)
    i_T1 = tl.arange(0, SPAN)[:, None]
    j_1T = tl.arange(0, SPAN)[None, :]
    below_TT = lower_mask(i_T1, j_1T, C)
    store_scalars(own_grads + token_head, own_T1 * scale, tokens, HV, SPAN)
    store_matrix(grad_scores + token_head * C, tl.where(below_TT, dscore_TT * scale, 0.0), tokens, 0, 0, HV, C, SPAN)
    k_dot_T1 = dv_v_T1
    if DELTA:
        store_matrix(grad_solve + token_head * C, tl.where(below_TT, dsolve_TT, 0.0), tokens, 0, 0, HV, C, SPAN)
        beta_T1 = load_beta(beta + token_head, 0, tokens, HV, beta_floor, SPAN)
        # two divisions: the square of a small beta would vanish
        dv_new_T1 /= tl.where(beta_T1 == 0.0, 1.0, beta_T1)
        k_dot_T1 = 2.0 * dv_new_T1 - dv_v_T1
        dv_new_T1 /= tl.where(beta_T1 == 0.0, 1.0, beta_T1)
        store_scalars(grad_beta + token_head, dv_new_T1, tokens, HV, SPAN)
    if L2NORM:
        store_scalars(q_dots + token_head, do_o_T1, tokens, HV, SPAN)
        store_scalars(k_dots + token_head, k_dot_T1, tokens, HV, SPAN)


@triton.jit
def gram_products(
    dq_TK, dk_TK, dg_TK, q_TK, k_TK, rise_TK, fall_TK, dscore_TT, dsolve_TT,
    DELTA: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the grams' gradients dP and dL' give to dq, dk and dG, with e^(G_i - G_j) = rise_i fall_j.

    An entry (i, j) adds to dG_i what it takes from dG_j. Both are formed from the *rounded* factors, so that they
    cancel exactly in the running sum: the difference of two roundings would drown the gradient of a strong decay.
    """
    fallen_TK = (k_TK * fall_TK).to(MMA)
    risen_TK = (q_TK * rise_TK).to(MMA)
    row_TK = tl.dot(dscore_TT, fallen_TK, input_precision=PRECISION)
    column_TK = tl.dot(tl.trans(dscore_TT), risen_TK, input_precision=PRECISION)
    dq_TK += rise_TK * row_TK
    dk_TK += fall_TK * column_TK
    dg_TK += risen_TK * row_TK
    dg_TK -= fallen_TK * column_TK
    if DELTA:
        # the columns apart: Triton gives a product that is added to another to both groups of four warps alike
        risen_TK = (k_TK * rise_TK).to(MMA)
        row_TK = tl.dot(dsolve_TT, fallen_TK, input_precision=PRECISION)
        column_TK = tl.dot(tl.trans(dsolve_TT), risen_TK, input_precision=PRECISION)
        dk_TK += rise_TK * row_TK
        dk_TK += fall_TK * column_TK
        dg_TK += risen_TK * row_TK
        dg_TK -= fallen_TK * column_TK
    return dq_TK, dk_TK, dg_TK


@triton.jit
def load_pair(x, y, at_TT, in_TT, BOTH: tl.constexpr):
    """A block of both grams' gradients; the first twice where there is no second."""
    x_TT = tl.load(x + at_TT, mask=in_TT, other=0.0)
    y_TT = x_TT
    if BOTH:
        y_TT = tl.load(y + at_TT, mask=in_TT, other=0.0)
    return x_TT, y_TT


@triton.jit
def load_values(
    grad_o, grad_v, values, token_head, tokens, own_T1, column, HV: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr,
    BV: tl.constexpr, DELTA: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """dO, dv (dO again without the delta rule) and V' of one chunk [T, V]."""
    at_TV, in_TV = tile_at(tokens, HV * V, column, V, SPAN, BV)
    at_TV += token_head * V
    in_TV = in_TV & own_T1
    do_TV = tl.load(grad_o + at_TV, mask=in_TV, other=0.0).to(MMA)
    dv_TV = do_TV
    if DELTA:
        dv_TV = tl.load(grad_v + at_TV, mask=in_TV, other=0.0).to(MMA)
    new_TV = tl.load(values + at_TV, mask=in_TV, other=0.0).to(MMA)
    return do_TV, dv_TV, new_TV


@triton.jit
def state_products(
    dq_TK, dk_TK, dk_end_TK, carried_K, do_TV, dv_TV, new_TV, states, grad_states, at_VK, in_VK,
    DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds dO S^T, -dv S^T, V' dS^T and the sums of S dS over V."""
    state_VK = tl.load(states + at_VK, mask=in_VK, other=0.0)
    dstate_VK = tl.load(grad_states + at_VK, mask=in_VK, other=0.0)
    dq_TK += tl.dot(do_TV, state_VK, input_precision=PRECISION)
    if DELTA:
        dk_TK -= tl.dot(dv_TV, state_VK, input_precision=PRECISION)
    dk_end_TK += tl.dot(new_TV, dstate_VK, input_precision=PRECISION)
    carried_K += tl.sum(state_VK.to(tl.float32) * dstate_VK.to(tl.float32), axis=0)
    return dq_TK, dk_TK, dk_end_TK, carried_K


@triton.jit(do_not_specialize=["length", "per_sequence", "spans"])
def gradient_kernel(
    q, k, g, q_norm, k_norm, decay_sums, highest, states, grad_states, values, grad_o, grad_v, grad_scores, grad_solve,
    own_grads, q_dots, k_dots, grad_q, grad_k, grad_g, chunks, scale, length, per_sequence, spans,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    LOG_C: tl.constexpr, LEAF: tl.constexpr, LOG_LEAF: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    BV: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one span and key head, for a decay per channel, summed in fp32 over its value heads.

    dq_i = e^G_i s dO_i S^T + sum_j dP_ij k_j e^(G_i - G_j), and so on (README); dg is the running sum, from the end of
    the chunk, of dG_i = q_i dq_i + k_i (dk_row_i - dk_column_i), in which the diagonal of dP has no part. A program
    goes through SLICES slices of K; what all of them need, dO, dv, V', dP and dL', it loads once where a key head has
    one value head.
    """
    groups = tl.cdiv(K, BK * SLICES)
    span = tl.program_id(0) // groups
    first_column = (tl.program_id(0) % groups) * (BK * SLICES)
    h = tl.program_id(1)
    start, tokens = span_of(chunks, span, length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    first_chunk = span
    if not PACKED:
        first_chunk = (span // spans) * per_sequence + (span % spans) * (SPAN // C)
    MMA: tl.constexpr = q.dtype.element_ty
    GROUP: tl.constexpr = HV // H
    ONCE: tl.constexpr = (GROUP == 1) & (SPAN == C) & (BV >= V)
    FAST: tl.constexpr = (LEAF == 16) & (C == 64) & (SPAN == C)
    key = (start * H + h) * K
    if L2NORM:
        q_norm += start * H + h
        k_norm += start * H + h
    i_T1 = tl.arange(0, SPAN)[:, None]
    j_1T = tl.arange(0, SPAN)[None, :]
    at_TT, in_TT = matrix_at(tokens, 0, 0, HV, C, SPAN)
    near_TT = in_TT & (i_T1 // 32 == j_1T // 32)
    if ONCE:
        once = start * HV + h
        do_TV, dv_TV, new_TV = load_values(
            grad_o, grad_v, values, once, tokens, i_T1 < tokens, 0, HV, V, SPAN, BV, DELTA, MMA
        )
        if FAST:
            dscore_TT, dsolve_TT = load_pair(grad_scores, grad_solve, once * C + at_TT, in_TT, DELTA)
            near_score_TT, near_solve_TT = load_pair(grad_scores, grad_solve, once * C + at_TT, near_TT, DELTA)
    for slice in range(0, SLICES):
        column = first_column + slice * BK
        q_TK = load_normed(q + key, q_norm, 0, tokens, column, H, K, L2NORM, SPAN, BK)
        k_TK = load_normed(k + key, k_norm, 0, tokens, column, H, K, L2NORM, SPAN, BK)
        dq_sum_TK = tl.zeros([SPAN, BK], tl.float32)
        dk_sum_TK = tl.zeros([SPAN, BK], tl.float32)
        q_dot_T1 = tl.zeros([SPAN, 1], tl.float32)
        k_dot_T1 = tl.zeros([SPAN, 1], tl.float32)
        for member in range(0, GROUP):
            hv = h * GROUP + member
            token_head = start * HV + hv
            matrix = token_head * C + at_TT
            # asked for before the products, used after them
            at_TK, in_TK = tile_at(tokens, HV * K, column, K, SPAN, BK)
            at_TK += token_head * K
            if FAST:
                sums = decay_sums + token_head * K
                sums_TK = load_sums(sums, 0, tokens, column, HV, K, SPAN, BK)
                last_1K = load_sums(sums, C - 1, tokens, column, HV, K, 1, BK)
                middle_1K = load_sums(sums, 31, tokens, column, HV, K, 1, BK)
                quarter_1K = load_sums(sums, 15, tokens, column, HV, K, 1, BK)
                last_quarter_1K = load_sums(sums, 47, tokens, column, HV, K, 1, BK)
                own_highest = highest + (first_chunk.to(tl.int64) * HV + hv) * tl.cdiv(K, min(BK, 32))
                # sums that only fall are largest at the ends of their segments
                falling = highest_decay(own_highest, column, K, BK) <= 0.0
                within = falling & (tl.min(tl.minimum(middle_1K, last_1K - middle_1K)) >= -80.0)
            else:
                g_TK = cut(tl.load(g + at_TK, mask=in_TK, other=0.0))
            own_grad_T1 = load_scalars(own_grads + token_head, 0, tokens, HV, SPAN)
            if L2NORM:
                q_dot_T1 += load_scalars(q_dots + token_head, 0, tokens, HV, SPAN)
                k_dot_T1 += load_scalars(k_dots + token_head, 0, tokens, HV, SPAN)
            dq_TK = tl.zeros([SPAN, BK], tl.float32)
            dk_TK = tl.zeros([SPAN, BK], tl.float32)
            dk_end_TK = tl.zeros([SPAN, BK], tl.float32)
            carried_TK = tl.zeros([SPAN, BK], tl.float32)
            for part in tl.static_range(SPAN // C):
                chunk_head = (first_chunk + part).to(tl.int64) * HV + hv
                carried_K = tl.zeros([BK], tl.float32)
                for v_column in range(0, V, BV):
                    at_VK, in_VK = transposed_at(K - column, V, v_column, V, BK, BV)
                    at_VK += (chunk_head * K + column) * V
                    in_VK = in_VK & (part * C < tokens)
                    if not ONCE:
                        do_TV, dv_TV, new_TV = load_values(
                            grad_o, grad_v, values, token_head, tokens, i_T1 // C == part, v_column, HV, V, SPAN, BV,
                            DELTA, MMA,
                        )  # fmt: skip
                    dq_TK, dk_TK, dk_end_TK, carried_K = state_products(
                        dq_TK, dk_TK, dk_end_TK, carried_K, do_TV, dv_TV, new_TV, states, grad_states, at_VK, in_VK,
                        DELTA, PRECISION,
                    )  # fmt: skip
                # at the chunk's last row, tokens or not: the running sum takes it to every row
                carried_TK += tl.where(i_T1 == part * C + C - 1, carried_K[None, :], 0.0)
            if FAST:
                through_TK = sums_TK
                past_TK = last_1K - sums_TK
            else:
                through_TK, past_TK = segment_sums(g_TK, C, SPAN, BK)
            through_TK = tl.exp(through_TK)
            dq_TK *= through_TK * scale
            dk_TK *= through_TK
            dk_end_TK *= tl.exp(past_TK)
            # what a chunk leaves to its end is decayed by every later step of the chunk: sum of the rows before
            ending_TK = k_TK * dk_end_TK
            dg_TK = q_TK * dq_TK + k_TK * dk_TK + carried_TK * through_TK
            dk_TK += dk_end_TK
            if FAST:
                dg_TK -= ending_TK
                ending_M1K = tl.sum(tl.reshape(ending_TK, (SPAN // C, C, BK)), axis=1, keep_dims=True)
                if not ONCE:
                    dscore_TT, dsolve_TT = load_pair(grad_scores, grad_solve, matrix, in_TT, DELTA)
                # relative to the middle of the chunk: all pairs where the decays allow it, else those across it only,
                # the others' factors being 0
                upper_T1 = i_T1 >= 32
                log_TK = sums_TK - middle_1K
                near_TK = tl.exp(tl.where(upper_T1, log_TK, -log_TK))
                over_TK = tl.where(within, tl.exp(tl.where(upper_T1, -log_TK, log_TK)), 0.0)
                dq_TK, dk_TK, dg_TK = gram_products(
                    dq_TK, dk_TK, dg_TK, q_TK, k_TK, tl.where(upper_T1, near_TK, over_TK),
                    tl.where(upper_T1, over_TK, near_TK), dscore_TT, dsolve_TT, DELTA, MMA, PRECISION,
                )  # fmt: skip
                if not within:
                    if not ONCE:
                        near_score_TT, near_solve_TT = load_pair(grad_scores, grad_solve, matrix, near_TT, DELTA)
                    # the same in the blocks of 32 rows
                    lowest_1K = tl.minimum(quarter_1K, middle_1K - quarter_1K)
                    lowest_1K = tl.minimum(lowest_1K, last_quarter_1K - middle_1K)
                    within_leaf = falling & (tl.min(tl.minimum(lowest_1K, last_1K - last_quarter_1K)) >= -80.0)
                    log_TK = sums_TK - tl.where(upper_T1, last_quarter_1K, quarter_1K)
                    upper_T1 = (i_T1 // LEAF) % 2 == 1
                    near_TK = tl.exp(tl.where(upper_T1, log_TK, -log_TK))
                    over_TK = tl.where(within_leaf, tl.exp(tl.where(upper_T1, -log_TK, log_TK)), 0.0)
                    dq_TK, dk_TK, dg_TK = gram_products(
                        dq_TK, dk_TK, dg_TK, q_TK, k_TK, tl.where(upper_T1, near_TK, over_TK),
                        tl.where(upper_T1, over_TK, near_TK), near_score_TT, near_solve_TT, DELTA, MMA, PRECISION,
                    )  # fmt: skip
                    if not within_leaf:
                        g_TK = cut(tl.load(g + at_TK, mask=in_TK, other=0.0))
                        leaf_score_TT, leaf_solve_TT = load_pair(
                            grad_scores, grad_solve, matrix, in_TT & (i_T1 // LEAF == j_1T // LEAF), DELTA
                        )
                        decay_TK = leaf_decay(g_TK, LEAF, SPAN, BK)
                        dq_TK, dk_TK, dg_TK = gram_products(
                            dq_TK, dk_TK, dg_TK, q_TK, k_TK, tl.exp(decay_TK), tl.exp(-decay_TK), leaf_score_TT,
                            leaf_solve_TT, DELTA, MMA, PRECISION,
                        )  # fmt: skip
                # one scan: the sum of the rows from here on, and of what the rows before leave to the chunk's end
                dg_MTK = tl.reshape(dg_TK, (SPAN // C, C, BK))
                total_M1K = tl.sum(dg_MTK, axis=1, keep_dims=True) + ending_M1K
                dg_TK = tl.reshape(dg_MTK + (total_M1K - tl.cumsum(dg_MTK, axis=1)), (SPAN, BK))
            else:
                for level in tl.static_range(LOG_LEAF, LOG_C):
                    factor_TK = half_factor(g_TK, 1 << level, SPAN, BK)
                    dscore_TT, dsolve_TT = load_pair(
                        grad_scores, grad_solve, matrix, in_TT & half_mask(i_T1, j_1T, 1 << level), DELTA
                    )
                    dq_TK, dk_TK, dg_TK = gram_products(
                        dq_TK, dk_TK, dg_TK, q_TK, k_TK, factor_TK, factor_TK, dscore_TT, dsolve_TT, DELTA, MMA,
                        PRECISION,
                    )  # fmt: skip
                if LEAF > 1:
                    # the same leaf: 0 on and above the diagonal as stored, and such a mask is loaded in vectors
                    dscore_TT, dsolve_TT = load_pair(
                        grad_scores, grad_solve, matrix, in_TT & (i_T1 // LEAF == j_1T // LEAF), DELTA
                    )
                    decay_TK = leaf_decay(g_TK, LEAF, SPAN, BK)
                    dq_TK, dk_TK, dg_TK = gram_products(
                        dq_TK, dk_TK, dg_TK, q_TK, k_TK, tl.exp(decay_TK), tl.exp(-decay_TK), dscore_TT, dsolve_TT,
                        DELTA, MMA, PRECISION,
                    )  # fmt: skip
                _, past_TK = segment_sums(dg_TK, C, SPAN, BK)
                before_TK, _ = segment_sums(ending_TK, C, SPAN, BK)
                # dG of this row and those after, and what the rows before leave to the end of the chunk
                dg_TK += past_TK + before_TK - ending_TK
            tl.store(grad_g + at_TK, dg_TK.to(grad_g.dtype.element_ty), mask=in_TK)
            dq_sum_TK += dq_TK + own_grad_T1 * k_TK
            dk_sum_TK += dk_TK + own_grad_T1 * q_TK
        if L2NORM:
            dq_sum_TK = (dq_sum_TK - q_TK * q_dot_T1) * load_scalars(q_norm, 0, tokens, H, SPAN)
            dk_sum_TK = (dk_sum_TK - k_TK * k_dot_T1) * load_scalars(k_norm, 0, tokens, H, SPAN)
        at_TK, in_TK = tile_at(tokens, H * K, column, K, SPAN, BK)
        tl.store(grad_q + key + at_TK, dq_sum_TK.to(grad_q.dtype.element_ty), mask=in_TK)
        tl.store(grad_k + key + at_TK, dk_sum_TK.to(grad_k.dtype.element_ty), mask=in_TK)


@triton.jit
def rows_of(x_RW, own_R1, SOME: tl.constexpr):
    """The rows of one chunk of a span, zeros elsewhere; the tile as it is where the span is a chunk."""
    if SOME:
        return tl.where(own_R1, x_RW, 0.0)
    return x_RW


@triton.jit
def transposed_tile(base, rows, stride, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The transpose [W, R] of a tile in fp32, loaded anew: to keep it would cost registers."""
    at_WR, in_WR = transposed_at(rows, stride, 0, WIDTH, R, W)
    return tl.load(base + at_WR, mask=in_WR, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length", "per_sequence", "spans"])
def head_gradient_kernel(
    q, k, g, beta, q_norm, k_norm, states, grad_states, values, grad_o, grad_v, grad_q, grad_k, grad_g, grad_beta,
    chunks, scale, beta_floor, length, per_sequence, spans,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LEAF: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta of one span and value head, for a decay per head or none.

    Everything that a chunk's gradients need is in one program: the gradients of the grams, X = s tril(dO V'^T) and
    Y = -stril(dv V'^T), both times the decay between the rows, never leave it. All is made transposed, [K, T]: what is
    made here is then the second operand of every product, and the first ones come as they were loaded. Norms and
    decays are factors of rows and columns of X and Y, so that q and k are operands as they are. grad_q and grad_k
    [tokens, HV, K] are a value head's share: a norm's gradient is linear, so that shares can be summed behind it.
    """
    span = tl.program_id(0)
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = span_of(chunks, span, length, spans, SPAN, PACKED)
    if tokens <= 0:
        return
    first_chunk = span
    if not PACKED:
        first_chunk = (span // spans) * per_sequence + (span % spans) * (SPAN // C)
    MMA: tl.constexpr = q.dtype.element_ty
    PAIR: tl.constexpr = 2 if DELTA else 1
    DOTS: tl.constexpr = (DECAY == "head") | L2NORM
    key = (start * H + h) * K
    i_T = tl.arange(0, SPAN)
    r_P1 = tl.arange(0, PAIR * SPAN)[:, None]
    i_P1 = r_P1 % SPAN
    j_1T = tl.arange(0, SPAN)[None, :]
    here_P1 = i_P1 < tokens
    below_PT = lower_mask(i_P1, j_1T, C)
    c_1K = tl.arange(0, KP)[None, :]
    at_PK = key + i_P1 * (H * K) + c_1K
    qk_PK = tl.load(tl.where(r_P1 < SPAN, q + at_PK, k + at_PK), mask=here_P1 & (c_1K < K), other=0.0)
    at_TK, in_TK = tile_at(tokens, H * K, 0, K, SPAN, KP)
    k_TK = tl.load(k + key + at_TK, mask=in_TK, other=0.0)
    q_scale_T = tl.full([SPAN], 1.0, tl.float32)
    k_scale_T = tl.full([SPAN], 1.0, tl.float32)
    if L2NORM:
        q_scale_T = load_vector(q_norm + start * H + h, tokens, H, SPAN)
        k_scale_T = load_vector(k_norm + start * H + h, tokens, H, SPAN)
    scale_P = pair_of(q_scale_T, k_scale_T, DELTA, SPAN)
    token_head = start * HV + hv
    z_PT = tl.zeros([PAIR * SPAN, SPAN], tl.float32)
    row_KP = tl.zeros([KP, PAIR * SPAN], tl.float32)
    end_KT = tl.zeros([KP, SPAN], tl.float32)
    carried_T = tl.zeros([SPAN], tl.float32)
    for v_column in range(0, V, BV):
        at_TV, in_TV = tile_at(tokens, HV * V, v_column, V, SPAN, BV)
        new_TV = tl.load(values + token_head * V + at_TV, mask=in_TV, other=0.0).to(MMA)
        c_1V = v_column + tl.arange(0, BV)[None, :]
        at_PV = token_head * V + i_P1 * (HV * V) + c_1V
        do_PV = tl.load(tl.where(r_P1 < SPAN, grad_o + at_PV, grad_v + at_PV), mask=here_P1 & (c_1V < V), other=0.0).to(
            MMA
        )
        z_PT += tl.dot(do_PV, tl.trans(new_TV), input_precision=PRECISION)
        for part in tl.static_range(SPAN // C):
            at_KV, in_KV = tile_at(K, V, v_column, V, KP, BV)
            at_KV += ((first_chunk + part).to(tl.int64) * HV + hv) * K * V
            in_KV = in_KV & (part * C < tokens)
            state_KV = tl.load(states + at_KV, mask=in_KV, other=0.0)
            dstate_KV = tl.load(grad_states + at_KV, mask=in_KV, other=0.0)
            if DECAY == "head":
                carried = tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32))
                # at the chunk's last row, tokens or not: the running sum takes it to every row
                carried_T += tl.where(i_T == part * C + C - 1, carried, 0.0)
            own_PV = rows_of(do_PV, i_P1 // C == part, SPAN > C)
            row_KP += tl.dot(state_KV, tl.trans(own_PV), input_precision=PRECISION)
            own_TV = rows_of(new_TV, (i_T // C == part)[:, None], SPAN > C)
            end_KT += tl.dot(dstate_KV, tl.trans(own_TV), input_precision=PRECISION)
    own_T, beta_grad_T = both_of(tl.sum(tl.where(i_P1 == j_1T, z_PT, 0.0), axis=1), DELTA, SPAN)
    own_T *= scale
    if DELTA:
        beta_T = load_vector(beta + token_head, tokens, HV, SPAN)
        beta_T = tl.where(tl.abs(beta_T) < beta_floor, beta_floor, beta_T)
        # two divisions: the square of a small beta would vanish
        store_vector(grad_beta + token_head, beta_grad_T / beta_T / beta_T, tokens, HV, SPAN)
    sign_P = tl.where(tl.arange(0, PAIR * SPAN) < SPAN, scale, -1.0)
    z_PT *= tl.where(below_PT, sign_P[:, None], 0.0)
    row_KP *= sign_P[None, :]
    if DECAY == "head":
        g_T = cut(load_vector(g + token_head, tokens, HV, SPAN))
        z_PT *= between_rows(g_T, i_P1, j_1T, below_PT, DELTA, LEAF == 1, SPAN)
        through_T, past_T = vector_sums(g_T, C, SPAN)
        through_T = tl.exp(through_T)
        row_KP *= pair_of(through_T, through_T, DELTA, SPAN)[None, :]
        end_KT *= tl.exp(past_T)[None, :]
    if DOTS:
        gram_PT = tl.dot(qk_PK, tl.trans(k_TK), input_precision=PRECISION)
        gram_PT *= scale_P[:, None] * k_scale_T[None, :]
        at_KP = key + (i_P1 * (H * K) + c_1K).T
        qk_KP = tl.load(tl.where((r_P1 < SPAN).T, q + at_KP, k + at_KP), mask=(here_P1 & (c_1K < K)).T, other=0.0).to(
            tl.float32
        )
        k_KT = transposed_tile(k + key, tokens, H * K, K, SPAN, KP)
        ending_T = tl.sum(k_KT * end_KT, axis=0) * k_scale_T
        columns_T = tl.sum(z_PT * gram_PT, axis=0)
        rows_P = tl.sum(z_PT * gram_PT, axis=1) + tl.sum(qk_KP * row_KP, axis=0) * scale_P
        q_row_T, k_row_T = both_of(rows_P, DELTA, SPAN)
    if L2NORM:
        cosine_T, _ = both_of(tl.sum(tl.where(i_P1 == j_1T, gram_PT, 0.0), axis=1), DELTA, SPAN)
        cosine_T *= own_T
        q_dot_T = q_row_T + cosine_T
        k_dot_T = k_row_T + columns_T + ending_T + cosine_T
    if DECAY == "head":
        # an entry of X or Y gives to the row's what it takes from the column's: the running sum cancels both
        dg_T = q_row_T + k_row_T - columns_T + carried_T * through_T
        _, after_T = vector_sums(dg_T, C, SPAN)
        before_T, _ = vector_sums(ending_T, C, SPAN)
        # dG of this row and those after, and what the rows before leave to the end of the chunk
        store_vector(grad_g + token_head, dg_T + after_T + before_T - ending_T, tokens, HV, SPAN)
    # what the grams give: [q; k]^T [X; Y] as columns, k^T [X; Y]^T as rows
    end_KT += tl.dot(tl.trans(qk_PK), (z_PT * scale_P[:, None]).to(MMA), input_precision=PRECISION)
    z_PT *= k_scale_T[None, :]
    row_KP += tl.dot(tl.trans(k_TK), tl.trans(z_PT.to(MMA)), input_precision=PRECISION)
    if DELTA:
        dq_KT, dk_KT = tl.split(tl.permute(tl.reshape(row_KP, (KP, 2, SPAN)), (0, 2, 1)))
        dk_KT += end_KT
    else:
        dq_KT = row_KP
        dk_KT = end_KT
    # the diagonal of X apart in fp32: it would drown its neighbours under a strong decay
    q_KT = transposed_tile(q + key, tokens, H * K, K, SPAN, KP)
    k_KT = transposed_tile(k + key, tokens, H * K, K, SPAN, KP)
    if L2NORM:
        # q . dq and k . dk from the sums over rows and columns of the grams: x = y / |y| takes them out of dy
        own_T *= q_scale_T * k_scale_T
        dq_KT *= q_scale_T[None, :]
        dk_KT *= k_scale_T[None, :]
        dq_KT -= q_KT * (q_dot_T * q_scale_T * q_scale_T)[None, :]
        dk_KT -= k_KT * (k_dot_T * k_scale_T * k_scale_T)[None, :]
    dq_KT += k_KT * own_T[None, :]
    dk_KT += q_KT * own_T[None, :]
    at_KT, in_KT = transposed_at(tokens, HV * K, 0, K, SPAN, KP)
    tl.store(grad_q + token_head * K + at_KT, dq_KT.to(grad_q.dtype.element_ty), mask=in_KT)
    tl.store(grad_k + token_head * K + at_KT, dk_KT.to(grad_k.dtype.element_ty), mask=in_KT)


# ---- host ----------------------------------------------------------------------------------------------------------


def padded(size):
    """The tile width for ``size`` channels: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def leaf_rows(dtype):
    """Rows of a block whose decays are taken relative to its middle row.

    bf16 reaches e^80, and e^-10 is below its resolution. fp16 overflows past e^11, and in fp32 an exponent of 80 costs
    80 roundings: both halve down to single rows, where no factor passes 1.
    """
    return 16 if dtype == torch.bfloat16 else 1


def smallest_beta(dtype):
    """What a beta of 0 is computed as: invisible beside the dtype's rounding, and its multiples still numbers."""
    return 2.0**-13 if dtype == torch.float16 else 1e-15


def traits(spec):
    """Backward reads o where q is normed and its channels are cut: q . dq, which the norm needs, is dO . o."""
    return {"saved_outputs": ("o",) if spec.decay == "channel" and spec.qk_l2norm else ()}


def chunk_table(cu_seqlens, tokens, chunk):
    """First token and token count of every chunk [chunks, 2] and every sequence's first chunk [N + 1], int64.

    The number of rows depends on sizes alone, so nothing waits for the device; rows past the last chunk are empty.
    """
    bounds = cu_seqlens.to(torch.int64)
    counts = (bounds[1:] - bounds[:-1] + chunk - 1) // chunk
    offsets = torch.zeros_like(bounds)
    torch.cumsum(counts, 0, out=offsets[1:])
    rows = tokens // chunk + counts.shape[0]
    index = torch.arange(rows, device=bounds.device)
    sequence = torch.searchsorted(offsets, index, right=True).sub_(1).clamp_(max=counts.shape[0] - 1)
    first = bounds[sequence] + (index - offsets[sequence]) * chunk
    count = (bounds[sequence + 1] - first).clamp_(0, chunk)
    return torch.stack((first, count), dim=1), offsets


def chunk_count(tensors, chunk):
    """Number of chunks that are launched, from sizes alone."""
    batch, length = tensors["q"].shape[:2]
    cu_seqlens = tensors.get("cu_seqlens")
    if cu_seqlens is None:
        return batch * triton.cdiv(length, chunk)
    return length // chunk + cu_seqlens.shape[0] - 1


def span_rows(tensors, rows, chunk):
    """Tokens of a program where chunks have no order: packed sequences have chunks that do not adjoin."""
    if tensors.get("cu_seqlens") is not None:
        return chunk
    return max(chunk, min(rows, triton.next_power_of_2(tensors["q"].shape[1])))


def decayed_like(tensors, spec, config):
    """Empty results of ``prepare_kernel``: norms, decayed q and k, decays of chunks, running sums of decays."""
    q = tensors["q"]
    batch, length, key_heads, key_dim = q.shape
    heads = tensors["v"].shape[2]
    count = chunk_count(tensors, config["chunk"])
    made = {}
    if spec.qk_l2norm:
        made["q_norm"] = q.new_empty((batch, length, key_heads), dtype=torch.float32)
        made["k_norm"] = torch.empty_like(made["q_norm"])
    made["q_decayed"] = q.new_empty((batch, length, heads, key_dim))
    made["k_decayed"] = torch.empty_like(made["q_decayed"])
    made["k_ending"] = torch.empty_like(made["q_decayed"])
    made["chunk_decay"] = q.new_empty((count, heads, key_dim), dtype=torch.float32)
    if q.dtype == torch.bfloat16 and config["chunk"] == 64:
        made["decay_sums"] = torch.empty_like(made["q_decayed"], dtype=torch.float32)
        made["highest"] = q.new_empty((count, heads, triton.cdiv(key_dim, 16)), dtype=torch.float32)
    return made


def factors_like(tensors, spec, config):
    """Empty norms and factors of rows and chunks, which ``head_gram_kernel`` makes beside its matrices."""
    q = tensors["q"]
    batch, length, key_heads = q.shape[:3]
    heads = tensors["v"].shape[2]
    made = {}
    if spec.qk_l2norm:
        made["q_norm"] = q.new_empty((batch, length, key_heads), dtype=torch.float32)
        made["k_norm"] = torch.empty_like(made["q_norm"])
    made["q_rows"] = q.new_empty((batch, length, heads), dtype=torch.float32)
    made["k_rows"] = torch.empty_like(made["q_rows"])
    made["end_rows"] = torch.empty_like(made["q_rows"])
    if spec.decay == "head":
        made["chunk_decay"] = q.new_empty((chunk_count(tensors, config["chunk"]), heads), dtype=torch.float32)
    return made


def states_like(tensors, spec, config):
    """Empty results of ``scan_kernel``: every chunk's first state [chunks, HV, K, V] and V', in the dtype of q."""
    q, v = tensors["q"], tensors["v"]
    count = chunk_count(tensors, config["chunk"])
    made = {"states": q.new_empty((count, v.shape[2], q.shape[3], v.shape[3]))}
    if spec.delta:
        made["values"] = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    return made


def outputs_like(tensors, spec, config):
    """Empty outputs and what is kept for the backward.

    Always the two matrices of every chunk [B, T, HV, C] and factors of rows; with ``keep_states`` states and V', with
    ``keep_decayed`` what ``prepare_kernel`` makes, which backward would otherwise compute again.
    """
    q, v, cu_seqlens = tensors["q"], tensors["v"], tensors.get("cu_seqlens")
    batch, length, heads, value_dim = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunk = config["chunk"]
    outputs = {
        "o": torch.empty_like(v, memory_format=torch.contiguous_format),
        "final_state": q.new_empty((sequences, heads, q.shape[3], value_dim), dtype=torch.float32),
    }
    saved = {"scores": q.new_empty((batch, length, heads, chunk))}
    if spec.delta:
        saved["solve"] = q.new_empty((batch, length, heads, chunk))
    if spec.decay == "channel" and spec.qk_l2norm:
        saved["o"] = outputs["o"]
    if config["keep_states"]:
        saved.update(states_like(tensors, spec, config))
    if spec.decay != "channel":
        saved.update(factors_like(tensors, spec, config))
    elif config["keep_decayed"]:
        saved.update(decayed_like(tensors, spec, config))
    return outputs, saved


def prepare(tensors, spec, config, made, chunks, scale):
    """Run ``prepare_kernel`` into the tensors of :func:`decayed_like`."""
    q, k, g = tensors["q"], tensors["k"], tensors.get("g")
    length, key_heads, key_dim = q.shape[1:]
    heads = tensors["v"].shape[2]
    chunk = config["chunk"]
    span = span_rows(tensors, config["prepare_rows"], chunk)
    prepare_kernel[(chunk_count(tensors, span), heads)](
        q, k, g, chunks, made.get("q_norm"), made.get("k_norm"), made["q_decayed"], made["k_decayed"], made["k_ending"],
        made["chunk_decay"], made.get("decay_sums"), made.get("highest"), scale, length, triton.cdiv(length, chunk),
        triton.cdiv(length, span),
        H=key_heads, HV=heads, K=key_dim, C=chunk, SPAN=span, KP=padded(key_dim),
        BK=min(config["prepare_bk"], padded(key_dim)),
        L2NORM=spec.qk_l2norm, PACKED=chunks is not None,
        num_warps=config["prepare_warps"], maxnreg=config["prepare_registers"],
    )  # fmt: skip


def scan(tensors, spec, config, made, offsets, final_state, o):
    """Run ``scan_kernel`` into the tensors of :func:`states_like` and ``o``, None for none; ``made`` has the rest."""
    k, v, cu_seqlens = tensors["k"], tensors["v"], tensors.get("cu_seqlens")
    initial_state = tensors.get("initial_state")
    length, key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[2], v.shape[3]
    chunk = config["chunk"]
    block = min(config["scan_bv"], padded(value_dim))
    scan_kernel[(final_state.shape[0] * heads * triton.cdiv(value_dim, block),)](
        tensors["q"], k, v, made.get("q_decayed"), made.get("k_decayed"), made.get("k_ending"),
        made.get("q_rows"), made.get("k_rows"), made.get("end_rows"), made.get("chunk_decay"), made["scores"],
        made.get("solve"), initial_state, final_state, made["states"], made.get("values"), o,
        cu_seqlens, offsets, length, triton.cdiv(length, chunk),
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, KP=padded(key_dim), BV=block,
        DECAY=spec.decay, DELTA=spec.delta, PACKED=cu_seqlens is not None, INITIAL=initial_state is not None,
        OUTPUT=o is not None, PRECISION="ieee" if k.dtype == torch.float32 else "tf32",
        num_warps=config["scan_warps"], num_stages=config["scan_stages"],
    )  # fmt: skip


def forward(tensors, spec, config):
    """o [B, T, HV, V] and the final states [N, HV, K, V]; keeps what :func:`outputs_like` says."""
    outputs, saved = outputs_like(tensors, spec, config)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    g, beta, initial_state = tensors.get("g"), tensors.get("beta"), tensors.get("initial_state")
    cu_seqlens = tensors.get("cu_seqlens")
    length, key_heads, key_dim = q.shape[1:]
    heads, value_dim = v.shape[2], v.shape[3]
    if q.numel() == 0 or v.numel() == 0:
        if initial_state is None:
            outputs["final_state"].zero_()
        else:
            outputs["final_state"].copy_(initial_state)
        return outputs, saved
    chunk = config["chunk"]
    scale = spec.scale if spec.scale is not None else key_dim**-0.5
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    chunks, offsets = None, None
    if cu_seqlens is not None:
        chunks, offsets = chunk_table(cu_seqlens, length, chunk)
    made = dict(saved)
    if not config["keep_states"]:
        made.update(states_like(tensors, spec, config))
    rows = config["gram_rows"]
    if spec.decay != "channel":
        span = span_rows(tensors, max(rows, chunk), chunk)
        head_gram_kernel[(chunk_count(tensors, span), heads)](
            q, k, g, beta, chunks, made.get("q_norm"), made.get("k_norm"), made["q_rows"], made["k_rows"],
            made["end_rows"], made.get("chunk_decay"), saved["scores"], saved.get("solve"),
            scale, smallest_beta(q.dtype), length, triton.cdiv(length, chunk), triton.cdiv(length, span),
            H=key_heads, HV=heads, K=key_dim, C=chunk, SPAN=span, KP=padded(key_dim),
            LOG_B=min(rows, chunk).bit_length() - 1, LEAF=leaf_rows(q.dtype),
            DECAY=spec.decay, DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None,
            PRECISION=precision,
            num_warps=config["gram_warps"], num_stages=config["gram_stages"], maxnreg=config["gram_registers"],
        )  # fmt: skip
    else:
        if not config["keep_decayed"]:
            made.update(decayed_like(tensors, spec, config))
        prepare(tensors, spec, config, made, chunks, scale)
        if rows >= chunk:
            rows = span_rows(tensors, rows, chunk)
        span = max(rows, chunk)
        block = min(rows, chunk)
        leaf = min(leaf_rows(q.dtype), block)
        gram_kernel[(chunk_count(tensors, span), heads)](
            q, k, g, beta, chunks, made.get("q_norm"), made.get("k_norm"), saved["scores"], saved.get("solve"),
            scale, smallest_beta(q.dtype), length, triton.cdiv(length, span),
            H=key_heads, HV=heads, K=key_dim, C=chunk, R=rows, LOG_B=block.bit_length() - 1,
            LEAF=leaf, LOG_LEAF=leaf.bit_length() - 1, BK=min(config["gram_bk"], padded(key_dim)),
            DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None, PRECISION=precision,
            num_warps=config["gram_warps"], num_stages=config["gram_stages"], maxnreg=config["gram_registers"],
        )  # fmt: skip
    scan(tensors, spec, config, made, offsets, outputs["final_state"], outputs["o"] if config["scan_output"] else None)
    if not config["scan_output"]:
        span = span_rows(tensors, config["output_rows"], chunk)
        block = min(config["output_bv"], padded(value_dim))
        output_kernel[(chunk_count(tensors, span) * triton.cdiv(value_dim, block), heads)](
            q, made.get("q_decayed"), made.get("q_rows"), made["states"], made["values"] if spec.delta else v,
            saved["scores"], outputs["o"], chunks, length, triton.cdiv(length, chunk), triton.cdiv(length, span),
            H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, SPAN=span, KP=padded(key_dim), BV=block,
            DECAY=spec.decay, PACKED=cu_seqlens is not None, PRECISION=precision,
            num_warps=config["output_warps"],
        )  # fmt: skip
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``, each in its input's dtype."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    g, beta, initial_state = tensors.get("g"), tensors.get("beta"), tensors.get("initial_state")
    cu_seqlens = tensors.get("cu_seqlens")
    grad_o, grad_final = grads.get("o"), grads.get("final_state")
    batch, length, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2], v.shape[3]
    grad_initial = None
    if initial_state is not None:
        grad_initial = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    if q.numel() == 0 or v.numel() == 0:
        if grad_initial is not None:
            if grad_final is None:
                grad_initial.zero_()
            else:
                grad_initial.copy_(grad_final)
        found = {"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": torch.zeros_like(v)}
        if spec.decay != "none":
            found["g"] = torch.zeros_like(g)
        if spec.delta:
            found["beta"] = torch.zeros_like(beta)
        found["initial_state"] = grad_initial
        return {name: found[name] for name in needs}
    grad_o = torch.zeros_like(v) if grad_o is None else grad_o.contiguous()
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    chunk = config["chunk"]
    per_sequence = triton.cdiv(length, chunk)
    scale = spec.scale if spec.scale is not None else key_dim**-0.5
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    leaf = min(leaf_rows(q.dtype), chunk)
    key_tile = padded(key_dim)
    chunks, offsets = None, None
    sequences = batch
    if cu_seqlens is not None:
        chunks, offsets = chunk_table(cu_seqlens, length, chunk)
        sequences = cu_seqlens.shape[0] - 1
    made = dict(saved)
    if spec.decay == "channel" and not config["keep_decayed"]:
        made.update(decayed_like(tensors, spec, config))
        prepare(tensors, spec, config, made, chunks, scale)
    if not config["keep_states"]:
        made.update(states_like(tensors, spec, config))
        final_state = q.new_empty((sequences, heads, key_dim, value_dim), dtype=torch.float32)
        scan(tensors, spec, config, made, offsets, final_state, None)
    states = made["states"]
    values = made["values"] if spec.delta else v
    grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    grad_states = torch.empty_like(states)
    block = min(config["reverse_bv"], padded(value_dim))
    reverse_kernel[(sequences * heads * triton.cdiv(value_dim, block),)](
        q, k, made.get("q_decayed"), made.get("k_decayed"), made.get("k_ending"),
        made.get("q_rows"), made.get("k_rows"), made.get("end_rows"), made.get("chunk_decay"),
        saved["scores"], saved.get("solve"), grad_o, grad_final,
        grad_v, grad_states, grad_initial, cu_seqlens, offsets, length, per_sequence,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, KP=key_tile, BV=block,
        DECAY=spec.decay, DELTA=spec.delta, PACKED=cu_seqlens is not None, FINAL=grad_final is not None,
        INITIAL=initial_state is not None, PRECISION=precision,
        num_warps=config["reverse_warps"], num_stages=config["reverse_stages"],
    )  # fmt: skip
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    grad_g = None if g is None else torch.empty_like(g, memory_format=torch.contiguous_format)
    grad_beta = None if beta is None else torch.empty_like(beta, memory_format=torch.contiguous_format)
    span = span_rows(tensors, config["gradient_rows"], chunk)
    if spec.decay != "channel":
        shared = heads > key_heads
        if shared:
            grad_q = q.new_empty((batch, length, heads, key_dim), dtype=torch.float32)
            grad_k = torch.empty_like(grad_q)
        head_gradient_kernel[(chunk_count(tensors, span), heads)](
            q, k, g, beta, made.get("q_norm"), made.get("k_norm"), states, grad_states, values, grad_o, grad_v,
            grad_q, grad_k, grad_g, grad_beta, chunks,
            scale, smallest_beta(q.dtype), length, per_sequence, triton.cdiv(length, span),
            H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, SPAN=span, KP=key_tile,
            BV=min(config["gradient_bv"], padded(value_dim)), LEAF=leaf,
            DECAY=spec.decay, DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None,
            PRECISION=precision,
            num_warps=config["gradient_warps"], num_stages=config["gradient_stages"],
            maxnreg=config["gradient_registers"],
        )  # fmt: skip
        if shared:
            grad_q = grad_q.unflatten(2, (key_heads, -1)).sum(3).to(q.dtype)
            grad_k = grad_k.unflatten(2, (key_heads, -1)).sum(3).to(k.dtype)
    else:
        grad_scores = torch.empty_like(saved["scores"])
        own_grads = q.new_empty((batch, length, heads), dtype=torch.float32)
        grad_solve, q_dots, k_dots = None, None, None
        if spec.delta:
            grad_solve = torch.empty_like(saved["solve"])
        if spec.qk_l2norm:
            q_dots = torch.empty_like(own_grads)
            k_dots = torch.empty_like(own_grads)
        score_span = span_rows(tensors, config["score_rows"], chunk)
        score_gradient_kernel[(chunk_count(tensors, score_span), heads)](
            v, beta, saved.get("o"), values, grad_o, grad_v, grad_scores, grad_solve,
            own_grads, q_dots, k_dots, grad_beta, chunks,
            scale, smallest_beta(q.dtype), length, triton.cdiv(length, score_span),
            HV=heads, V=value_dim, C=chunk, SPAN=score_span, BV=min(config["score_bv"], padded(value_dim)),
            DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None, PRECISION=precision,
            num_warps=config["score_warps"], num_stages=config["score_stages"], maxnreg=config["score_registers"],
        )  # fmt: skip
        block = min(config["gradient_bk"], key_tile)
        slices = min(config["gradient_slices"], triton.cdiv(key_dim, block))
        programs = chunk_count(tensors, span) * triton.cdiv(key_dim, block * slices)
        gradient_kernel[(programs, key_heads)](
            q, k, g, made.get("q_norm"), made.get("k_norm"), made.get("decay_sums"), made.get("highest"),
            states, grad_states, values, grad_o, grad_v, grad_scores, grad_solve, own_grads, q_dots, k_dots,
            grad_q, grad_k, grad_g, chunks,
            scale, length, per_sequence, triton.cdiv(length, span),
            H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, SPAN=span, LOG_C=chunk.bit_length() - 1,
            LEAF=leaf, LOG_LEAF=leaf.bit_length() - 1, BK=block, SLICES=slices,
            BV=min(config["gradient_bv"], padded(value_dim)),
            DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None, PRECISION=precision,
            num_warps=config["gradient_warps"], num_stages=config["gradient_stages"],
            maxnreg=config["gradient_registers"],
        )  # fmt: skip
    found = {"q": grad_q, "k": grad_k, "v": grad_v, "initial_state": grad_initial}
    found["g"] = grad_g
    found["beta"] = grad_beta
    return {name: found[name] for name in needs}


def tile_dim(size):
    """Channels of a tile that holds a head: what shared memory and registers have to hold."""
    if size <= 64:
        return 64
    if size <= 128:
        return 128
    return 256


def bucket(tensors, spec):
    """The sizes by which a configuration is chosen."""
    q, v = tensors["q"], tensors["v"]
    key_dim = tile_dim(q.shape[3])
    return {
        "tokens": q.shape[0] * q.shape[1],
        "heads": v.shape[2],
        "key_dim": key_dim,
        "value_dim": tile_dim(v.shape[3]),
        "decay_dim": key_dim if spec.decay == "channel" else 1,
        "element_bytes": q.element_size(),
    }
