"""Chunked linear attention with a decayed matrix state: Triton kernels and their host functions.

Tokens are cut into chunks of C; the recurrence runs over chunks, everything inside a chunk is matrix products. The
formulas of forward and backward, and why nothing overflows, are in the family's README. Six kernels:

    forward   prepare_kernel   norms, running decay; q and k times their decays
              gram_kernel      scores P = s tril(q k^T decayed) and solve M = (I + L)^-1 Diag(beta), per chunk
              scan_kernel      the state over chunks, cut over V; writes o
    backward  prepare_kernel, and scan_kernel again for the states and the corrected values
              reverse_kernel   the state's gradient over chunks, last to first; writes dv
              score_gradient_kernel    gradients of the two grams, of beta, and the row dots of the norms
              gradient_kernel  dq, dk, dg

Tile names carry their shape: T token rows of a chunk (C of them), R token rows of a half chunk, K key channels,
V value channels. A decay per channel multiplies q and k before the products; a decay per head (or none) multiplies
rows of their results, so that there q and k feed every product as they were loaded.
"""

import torch
import triton
import triton.language as tl

# ---- tiles ---------------------------------------------------------------------------------------------------------


@triton.jit
def chunk_span(chunks, chunk, length, per_sequence, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a chunk, counted over all sequences (int64), and its number of tokens."""
    if PACKED:
        start = tl.load(chunks + 2 * chunk)
        tokens = tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    else:
        first = (chunk % per_sequence) * C
        start = (chunk // per_sequence).to(tl.int64) * length + first
        tokens = tl.minimum(length - first, C)
    return start, tokens


@triton.jit
def load_rows(base, row, rows, stride, column, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """A tile [R, W] of a tensor whose rows lie ``stride`` apart; zeros past ``rows`` and past ``WIDTH``."""
    r_R = row + tl.arange(0, R)
    c_W = column + tl.arange(0, W)
    mask_RW = (r_R[:, None] < rows) & (c_W[None, :] < WIDTH)
    return tl.load(base + r_R[:, None] * stride + c_W[None, :], mask=mask_RW, other=0.0)


@triton.jit
def load_columns(base, row, rows, stride, column, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The transpose of :func:`load_rows`, a tile [W, R]: a product's operand must come straight from memory."""
    r_R = row + tl.arange(0, R)
    c_W = column + tl.arange(0, W)
    mask_WR = (c_W[:, None] < WIDTH) & (r_R[None, :] < rows)
    return tl.load(base + c_W[:, None] + r_R[None, :] * stride, mask=mask_WR, other=0.0)


@triton.jit
def store_rows(
    base, x_RW, row, rows, stride, column, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """Write a tile [R, W] where it lies within ``rows`` and ``WIDTH``, in the dtype of the destination."""
    r_R = row + tl.arange(0, R)
    c_W = column + tl.arange(0, W)
    mask_RW = (r_R[:, None] < rows) & (c_W[None, :] < WIDTH)
    tl.store(
        base + r_R[:, None] * stride + c_W[None, :], x_RW.to(base.dtype.element_ty),
        mask=mask_RW,
    )  # fmt: skip


@triton.jit
def load_scalars(base, row, rows, stride, R: tl.constexpr):
    """One fp32 value per token [R]; zeros past ``rows``."""
    r_R = row + tl.arange(0, R)
    return tl.load(base + r_R * stride, mask=r_R < rows, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(base, x_R, row, rows, stride, R: tl.constexpr):
    """Write one value per token [R]."""
    r_R = row + tl.arange(0, R)
    tl.store(base + r_R * stride, x_R.to(base.dtype.element_ty), mask=r_R < rows)


# ---- decays inside a tile ------------------------------------------------------------------------------------------


@triton.jit
def segment_decay(g_RK, SEGMENT: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Log decays inside segments of rows: from the segment's start through each row, and past each row to its end."""
    g_SRK = tl.reshape(g_RK, (R // SEGMENT, SEGMENT, W))
    through_SRK = tl.cumsum(g_SRK, axis=1)
    past_SRK = tl.cumsum(g_SRK, axis=1, reverse=True) - g_SRK
    return tl.reshape(through_SRK, (R, W)), tl.reshape(past_SRK, (R, W))


@triton.jit
def half_factor(g_RK, HALF: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Decay between each row and the middle of its block of 2 HALF rows: never above 1, so it cannot overflow.

    A row of the upper half reads e^(decay since the middle), a row of the lower half e^(decay up to the middle);
    their product is the decay between the two, exactly.
    """
    through_RK, past_RK = segment_decay(g_RK, HALF, R, W)
    upper_R1 = ((tl.arange(0, R) // HALF) % 2 == 1)[:, None]
    return tl.exp(tl.where(upper_R1, through_RK, past_RK))


@triton.jit
def half_mask(i_R1, j_1R, HALF: tl.constexpr):
    """Pairs (i, j) with i in the upper and j in the lower half of the same block of 2 HALF rows."""
    return (i_R1 // (2 * HALF) == j_1R // (2 * HALF)) & ((i_R1 // HALF) % 2 == 1) & ((j_1R // HALF) % 2 == 0)


@triton.jit
def leaf_factor(g_RK, LEAF: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Log decay of each row relative to the middle row of its block of LEAF rows; within +-80.

    A step of more than 160 / LEAF is cut: what it hides is below e^(-160 / LEAF) of the diagonal.
    """
    g_SRK = tl.reshape(tl.maximum(g_RK, -160.0 / LEAF), (R // LEAF, LEAF, W))
    through_SRK = tl.cumsum(g_SRK, axis=1)
    to_middle_SRK = tl.where(tl.arange(0, LEAF)[None, :, None] <= LEAF // 2, g_SRK, 0.0)
    middle_S1K = tl.sum(to_middle_SRK, axis=1, keep_dims=True)
    return tl.reshape(through_SRK - middle_S1K, (R, W))


@triton.jit
def leaf_mask(i_R1, j_1R, LEAF: tl.constexpr):
    """Pairs (i, j), j before i, of the same block of LEAF rows."""
    return (i_R1 // LEAF == j_1R // LEAF) & (i_R1 > j_1R)


@triton.jit
def unit_lower_inverse(l_RR, R: tl.constexpr, LOG_R: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower L, by doubling: inverses of blocks of b rows give those of 2 b."""
    i_R1 = tl.arange(0, R)[:, None]
    j_1R = tl.arange(0, R)[None, :]
    x_RR = tl.where(i_R1 == j_1R, 1.0, 0.0) - tl.where(half_mask(i_R1, j_1R, 1), l_RR, 0.0)
    for level in tl.static_range(1, LOG_R):
        step_RR = tl.where(half_mask(i_R1, j_1R, 1 << level), l_RR, 0.0)
        step_RR = tl.dot(x_RR, step_RR, input_precision=PRECISION)
        x_RR -= tl.dot(step_RR, x_RR, input_precision=PRECISION)
    return x_RR


@triton.jit
def pair_decay(decay_i_R, decay_j_R, mask_RR):
    """e^(G_i - G_j) where ``mask`` holds and 0 elsewhere; G is the running log decay."""
    difference_RR = tl.where(mask_RR, decay_i_R[:, None] - decay_j_R[None, :], 0.0)
    return tl.where(mask_RR, tl.exp(difference_RR), 0.0)


# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "per_sequence"])
def prepare_kernel(
    q, k, g, chunks, q_norm, k_norm, q_decayed, k_decayed, k_ending, row_decay, q_rows, k_rows, end_rows, chunk_decay,
    scale, length, per_sequence,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    DECAY: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Norms of q and k, the chunk's running decay, and what carries it: scaled tiles or scaled rows.

    Decay per channel: q_decayed = s q e^G, k_decayed = k e^G, k_ending = k e^(G_C - G) [tokens, HV, K].
    Otherwise: the factors of their rows, q_rows = s e^G / |q| and so on [tokens, HV].
    """
    chunk = tl.program_id(0)
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = chunk_span(chunks, chunk, length, per_sequence, C, PACKED)
    if tokens <= 0:
        return
    key_base = (start * H + h) * K
    q_scale_T = tl.full([C], 1.0, tl.float32)
    k_scale_T = tl.full([C], 1.0, tl.float32)
    if L2NORM or DECAY == "channel":
        q_TK = load_rows(q + key_base, 0, tokens, H * K, 0, K, C, KP).to(tl.float32)
        k_TK = load_rows(k + key_base, 0, tokens, H * K, 0, K, C, KP).to(tl.float32)
    if L2NORM:
        q_scale_T = 1.0 / tl.sqrt(tl.sum(q_TK * q_TK, axis=1) + 1e-6)
        k_scale_T = 1.0 / tl.sqrt(tl.sum(k_TK * k_TK, axis=1) + 1e-6)
        if hv % (HV // H) == 0:
            store_scalars(q_norm + start * H + h, q_scale_T, 0, tokens, H, C)
            store_scalars(k_norm + start * H + h, k_scale_T, 0, tokens, H, C)
    if DECAY == "channel":
        base = (start * HV + hv) * K
        g_TK = load_rows(g + base, 0, tokens, HV * K, 0, K, C, KP).to(tl.float32)
        through_TK, past_TK = segment_decay(g_TK, C, C, KP)
        from_start_TK = tl.exp(through_TK)
        q_TK = q_TK * (q_scale_T * scale)[:, None]
        k_TK = k_TK * k_scale_T[:, None]
        store_rows(q_decayed + base, q_TK * from_start_TK, 0, tokens, HV * K, 0, K, C, KP)
        store_rows(k_decayed + base, k_TK * from_start_TK, 0, tokens, HV * K, 0, K, C, KP)
        store_rows(k_ending + base, k_TK * tl.exp(past_TK), 0, tokens, HV * K, 0, K, C, KP)
        c_K = tl.arange(0, KP)
        decay_K = tl.exp(tl.sum(g_TK, axis=0))
        tl.store(chunk_decay + (chunk.to(tl.int64) * HV + hv) * K + c_K, decay_K, mask=c_K < K)
    else:
        base = start * HV + hv
        through_T = tl.zeros([C], tl.float32)
        past_T = tl.zeros([C], tl.float32)
        if DECAY == "head":
            g_T = load_scalars(g + base, 0, tokens, HV, C)
            through_T = tl.cumsum(g_T, axis=0)
            past_T = tl.cumsum(g_T, axis=0, reverse=True) - g_T
            tl.store(chunk_decay + chunk.to(tl.int64) * HV + hv, tl.exp(tl.sum(g_T, axis=0)))
            store_scalars(row_decay + base, through_T, 0, tokens, HV, C)
        store_scalars(q_rows + base, q_scale_T * tl.exp(through_T) * scale, 0, tokens, HV, C)
        store_scalars(k_rows + base, k_scale_T * tl.exp(through_T), 0, tokens, HV, C)
        store_scalars(end_rows + base, k_scale_T * tl.exp(past_T), 0, tokens, HV, C)


@triton.jit
def normed_rows(
    x, norm, row, tokens, column, H: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """A tile of q or k in fp32, divided by its rows' norms where the operator normalises."""
    x_RK = load_rows(x, row, tokens, H * K, column, K, R, W).to(tl.float32)
    if L2NORM:
        x_RK *= load_scalars(norm, row, tokens, H, R)[:, None]
    return x_RK


@triton.jit
def diagonal_grams(
    qk_RR, kk_RR, q_RK, k_RK, g_RK,
    DECAY: tl.constexpr, DELTA: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr, LEAF: tl.constexpr,
    LOG_LEAF: tl.constexpr, LOG_R: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds to q k^T and k k^T of one half chunk, strictly below the diagonal, what these channels contribute."""
    i_R1 = tl.arange(0, R)[:, None]
    j_1R = tl.arange(0, R)[None, :]
    if DECAY == "channel":
        for level in tl.static_range(LOG_LEAF, LOG_R):
            factor_RK = half_factor(g_RK, 1 << level, R, W)
            mask_RR = half_mask(i_R1, j_1R, 1 << level)
            near_RK = (k_RK * factor_RK).to(MMA)
            far_KR = tl.trans(near_RK)
            part_RR = tl.dot((q_RK * factor_RK).to(MMA), far_KR, input_precision=PRECISION)
            qk_RR += tl.where(mask_RR, part_RR, 0.0)
            if DELTA:
                kk_RR += tl.where(mask_RR, tl.dot(near_RK, far_KR, input_precision=PRECISION), 0.0)
        if LEAF > 1:
            decay_RK = leaf_factor(g_RK, LEAF, R, W)
            rise_RK = tl.exp(decay_RK)
            far_KR = tl.trans((k_RK * tl.exp(-decay_RK)).to(MMA))
            mask_RR = leaf_mask(i_R1, j_1R, LEAF)
            part_RR = tl.dot((q_RK * rise_RK).to(MMA), far_KR, input_precision=PRECISION)
            qk_RR += tl.where(mask_RR, part_RR, 0.0)
            if DELTA:
                part_RR = tl.dot((k_RK * rise_RK).to(MMA), far_KR, input_precision=PRECISION)
                kk_RR += tl.where(mask_RR, part_RR, 0.0)
    else:
        far_KR = tl.trans(k_RK.to(MMA))
        qk_RR += tl.dot(q_RK.to(MMA), far_KR, input_precision=PRECISION)
        if DELTA:
            kk_RR += tl.dot(k_RK.to(MMA), far_KR, input_precision=PRECISION)
    return qk_RR, kk_RR


@triton.jit
def store_block(base, x_RR, row, column, R: tl.constexpr, C: tl.constexpr):
    """Write a block [R, R] of a chunk's matrix [C, C]."""
    r_R = row + tl.arange(0, R)
    c_R = column + tl.arange(0, R)
    tl.store(base + r_R[:, None] * C + c_R[None, :], x_RR.to(base.dtype.element_ty))


@triton.jit(do_not_specialize=["length", "per_sequence"])
def gram_kernel(
    q, k, g, beta, chunks, q_norm, k_norm, row_decay, scores, solve, scale, beta_floor, length, per_sequence,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, LOG_R: tl.constexpr,
    LEAF: tl.constexpr, LOG_LEAF: tl.constexpr, BK: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores P [C, C] and solve M = (I + L)^-1 Diag(beta) [C, C] of one chunk and head, in half chunks of R rows.

    P_ij = s sum_c q_ic k_jc e^(G_ic - G_jc) for i >= j;  L_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc) for i > j.
    """
    chunk = tl.program_id(0)
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = chunk_span(chunks, chunk, length, per_sequence, C, PACKED)
    if tokens <= 0:
        return
    MMA: tl.constexpr = q.dtype.element_ty
    q += (start * H + h) * K
    k += (start * H + h) * K
    if L2NORM:
        q_norm += start * H + h
        k_norm += start * H + h
    i_R1 = tl.arange(0, R)[:, None]
    j_1R = tl.arange(0, R)[None, :]
    qk0_RR = tl.zeros([R, R], tl.float32)
    kk0_RR = tl.zeros([R, R], tl.float32)
    own0_R = tl.zeros([R], tl.float32)
    if C > R:
        qk1_RR = tl.zeros([R, R], tl.float32)
        kk1_RR = tl.zeros([R, R], tl.float32)
        qk10_RR = tl.zeros([R, R], tl.float32)
        kk10_RR = tl.zeros([R, R], tl.float32)
        own1_R = tl.zeros([R], tl.float32)
    for column in range(0, K, BK):
        q0_RK = normed_rows(q, q_norm, 0, tokens, column, H, K, L2NORM, R, BK)
        k0_RK = normed_rows(k, k_norm, 0, tokens, column, H, K, L2NORM, R, BK)
        own0_R += tl.sum(q0_RK * k0_RK, axis=1)
        g0_RK = q0_RK
        if DECAY == "channel":
            g_base = g + (start * HV + hv) * K
            g0_RK = load_rows(g_base, 0, tokens, HV * K, column, K, R, BK).to(tl.float32)
        qk0_RR, kk0_RR = diagonal_grams(
            qk0_RR, kk0_RR, q0_RK, k0_RK, g0_RK, DECAY, DELTA, MMA, PRECISION, LEAF, LOG_LEAF, LOG_R, R, BK
        )
        if C > R:
            q1_RK = normed_rows(q, q_norm, R, tokens, column, H, K, L2NORM, R, BK)
            k1_RK = normed_rows(k, k_norm, R, tokens, column, H, K, L2NORM, R, BK)
            own1_R += tl.sum(q1_RK * k1_RK, axis=1)
            g1_RK = q1_RK
            if DECAY == "channel":
                g1_RK = load_rows(g_base, R, tokens, HV * K, column, K, R, BK).to(tl.float32)
            qk1_RR, kk1_RR = diagonal_grams(
                qk1_RR, kk1_RR, q1_RK, k1_RK, g1_RK, DECAY, DELTA, MMA, PRECISION, LEAF, LOG_LEAF, LOG_R, R, BK
            )
            if DECAY == "channel":
                # both relative to the boundary between the halves
                since_RK = tl.exp(tl.cumsum(g1_RK, axis=0))
                until_RK = tl.exp(tl.cumsum(g0_RK, axis=0, reverse=True) - g0_RK)
                q1_RK *= since_RK
                k1_RK *= since_RK
                k0_RK *= until_RK
            far_KR = tl.trans(k0_RK.to(MMA))
            qk10_RR += tl.dot(q1_RK.to(MMA), far_KR, input_precision=PRECISION)
            if DELTA:
                kk10_RR += tl.dot(k1_RK.to(MMA), far_KR, input_precision=PRECISION)

    # j before i, and below the diagonal of the whole chunk everything in block (1, 0)
    lower_RR = i_R1 > j_1R
    if DECAY == "head":
        row_decay += start * HV + hv
        decay0_R = load_scalars(row_decay, 0, tokens, HV, R)
        # rows past the last token must not see a decay of 0 after one of -1000
        between_RR = pair_decay(decay0_R, decay0_R, lower_RR & (i_R1 < tokens))
        qk0_RR *= between_RR
        kk0_RR *= between_RR
        if C > R:
            decay1_R = load_scalars(row_decay, R, tokens, HV, R)
            between_RR = pair_decay(decay1_R, decay1_R, lower_RR & (R + i_R1 < tokens))
            qk1_RR *= between_RR
            kk1_RR *= between_RR
            between_RR = pair_decay(decay1_R, decay0_R, (R + i_R1 < tokens) & (j_1R >= 0))
            qk10_RR *= between_RR
            kk10_RR *= between_RR
    matrix = (chunk.to(tl.int64) * HV + hv) * C * C
    scores += matrix
    score_RR = tl.where(lower_RR, qk0_RR, 0.0) + tl.where(i_R1 == j_1R, own0_R[:, None], 0.0)
    store_block(scores, score_RR * scale, 0, 0, R, C)
    if C > R:
        score_RR = tl.where(lower_RR, qk1_RR, 0.0) + tl.where(i_R1 == j_1R, own1_R[:, None], 0.0)
        store_block(scores, score_RR * scale, R, R, R, C)
        store_block(scores, qk10_RR * scale, R, 0, R, C)
        store_block(scores, tl.zeros([R, R], tl.float32), 0, R, R, C)
    if DELTA:
        solve += matrix
        beta += start * HV + hv
        beta0_R = floored_beta(beta, 0, tokens, HV, beta_floor, R)
        l0_RR = tl.where(lower_RR, kk0_RR * beta0_R[:, None], 0.0)
        inverse0_RR = unit_lower_inverse(l0_RR, R, LOG_R, PRECISION)
        store_block(solve, inverse0_RR * beta0_R[None, :], 0, 0, R, C)
        if C > R:
            beta1_R = floored_beta(beta, R, tokens, HV, beta_floor, R)
            l1_RR = tl.where(lower_RR, kk1_RR * beta1_R[:, None], 0.0)
            inverse1_RR = unit_lower_inverse(l1_RR, R, LOG_R, PRECISION)
            store_block(solve, inverse1_RR * beta1_R[None, :], R, R, R, C)
            cross_RR = tl.dot(inverse1_RR, kk10_RR * beta1_R[:, None], input_precision=PRECISION)
            cross_RR = -tl.dot(cross_RR, inverse0_RR, input_precision=PRECISION)
            store_block(solve, cross_RR * beta0_R[None, :], R, 0, R, C)
            store_block(solve, tl.zeros([R, R], tl.float32), 0, R, R, C)


@triton.jit
def floored_beta(beta, row, tokens, stride, floor, R: tl.constexpr):
    """beta, kept off 0 so that its gradient, a quotient of two multiples of beta, exists there too [R]."""
    beta_R = load_scalars(beta, row, tokens, stride, R)
    beta_R = tl.where(tl.abs(beta_R) < floor, floor, beta_R)
    return tl.where(row + tl.arange(0, R) < tokens, beta_R, 0.0)


@triton.jit
def load_state(base, v_column, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr):
    """A slice of a state [K, V] as a tile [KP, BV]; zeros outside."""
    return load_rows(base, 0, K, V, v_column, V, KP, BV)


@triton.jit(do_not_specialize=["length", "per_sequence"])
def scan_kernel(
    q, k, v, q_decayed, k_decayed, k_ending, q_rows, k_rows, end_rows, chunk_decay, scores, solve, initial_state,
    o, final_state, states, values, chunks, offsets, length, per_sequence,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    OUTPUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state over the chunks of one sequence, head and slice of V.

    V' = M (v - k_decayed S);  o = q_decayed S + P V';  S <- e^G_C S + k_ending^T V'. With OUTPUT, o and the final
    state are written (forward); without, every chunk's starting state and V' (for the backward).
    """
    slices = tl.cdiv(V, BV)
    v_column = (tl.program_id(0) % slices) * BV
    hv = (tl.program_id(0) // slices) % HV
    sequence = tl.program_id(0) // slices // HV
    h = hv // (HV // H)
    MMA: tl.constexpr = q.dtype.element_ty
    state_base = (sequence.to(tl.int64) * HV + hv) * K * V
    if PACKED:
        first = tl.load(offsets + sequence).to(tl.int32)
        last = tl.load(offsets + sequence + 1).to(tl.int32)
    else:
        first = sequence * per_sequence
        last = first + per_sequence
    state_KV = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        state_KV += load_state(initial_state + state_base, v_column, K, V, KP, BV).to(tl.float32)
    for step in range(0, last - first):
        chunk = first + step
        start, tokens = chunk_span(chunks, chunk, length, per_sequence, C, PACKED)
        chunk_head = chunk.to(tl.int64) * HV + hv
        token_head = start * HV + hv
        narrow_KV = state_KV.to(MMA)
        v_TV = load_rows(v + token_head * V, 0, tokens, HV * V, v_column, V, C, BV)
        if not OUTPUT:
            store_rows(states + chunk_head * K * V, narrow_KV, 0, K, V, v_column, V, KP, BV)
        if DELTA:
            if DECAY == "channel":
                k_TK = load_rows(k_decayed + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
                known_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION)
            else:
                k_TK = load_rows(k + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
                known_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION)
                known_TV *= load_scalars(k_rows + token_head, 0, tokens, HV, C)[:, None]
            solve_TT = load_rows(solve + chunk_head * C * C, 0, C, C, 0, C, C, C)
            new_TV = tl.dot(solve_TT, (v_TV - known_TV).to(MMA), input_precision=PRECISION)
        else:
            new_TV = v_TV.to(tl.float32)
        new_narrow_TV = new_TV.to(MMA)
        if OUTPUT:
            if DECAY == "channel":
                q_TK = load_rows(q_decayed + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
                o_TV = tl.dot(q_TK, narrow_KV, input_precision=PRECISION)
            else:
                q_TK = load_rows(q + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
                o_TV = tl.dot(q_TK, narrow_KV, input_precision=PRECISION)
                o_TV *= load_scalars(q_rows + token_head, 0, tokens, HV, C)[:, None]
            score_TT = load_rows(scores + chunk_head * C * C, 0, C, C, 0, C, C, C)
            o_TV += tl.dot(score_TT, new_narrow_TV, input_precision=PRECISION)
            store_rows(o + token_head * V, o_TV, 0, tokens, HV * V, v_column, V, C, BV)
        elif DELTA:
            store_rows(values + token_head * V, new_narrow_TV, 0, tokens, HV * V, v_column, V, C, BV)
        if DECAY == "channel":
            c_K = tl.arange(0, KP)
            decay_K = tl.load(chunk_decay + chunk_head * K + c_K, mask=c_K < K, other=0.0)
            k_KT = load_columns(k_ending + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
            state_KV = state_KV * decay_K[:, None] + tl.dot(k_KT, new_narrow_TV, input_precision=PRECISION)
        else:
            if DECAY == "head":
                state_KV *= tl.load(chunk_decay + chunk_head)
            end_T = load_scalars(end_rows + token_head, 0, tokens, HV, C)
            k_KT = load_columns(k + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
            ending_TV = (new_TV * end_T[:, None]).to(MMA)
            state_KV += tl.dot(k_KT, ending_TV, input_precision=PRECISION)
    if OUTPUT:
        store_rows(final_state + state_base, state_KV, 0, K, V, v_column, V, KP, BV)


# ---- backward ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "per_sequence"])
def reverse_kernel(
    q, k, q_decayed, k_decayed, k_ending, q_rows, k_rows, end_rows, chunk_decay, scores, solve, grad_o, grad_final,
    grad_v, grad_states, grad_initial, chunks, offsets, length, per_sequence,
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
    state_base = (sequence.to(tl.int64) * HV + hv) * K * V
    if PACKED:
        first = tl.load(offsets + sequence).to(tl.int32)
        last = tl.load(offsets + sequence + 1).to(tl.int32)
    else:
        first = sequence * per_sequence
        last = first + per_sequence
    grad_KV = tl.zeros([KP, BV], tl.float32)
    if FINAL:
        grad_KV += load_state(grad_final + state_base, v_column, K, V, KP, BV).to(tl.float32)
    for step in range(0, last - first):
        chunk = last - 1 - step
        start, tokens = chunk_span(chunks, chunk, length, per_sequence, C, PACKED)
        chunk_head = chunk.to(tl.int64) * HV + hv
        token_head = start * HV + hv
        narrow_KV = grad_KV.to(MMA)
        store_rows(grad_states + chunk_head * K * V, narrow_KV, 0, K, V, v_column, V, KP, BV)
        do_TV = load_rows(grad_o + token_head * V, 0, tokens, HV * V, v_column, V, C, BV)
        score_TT = load_columns(scores + chunk_head * C * C, 0, C, C, 0, C, C, C)
        if DECAY == "channel":
            end_TK = load_rows(k_ending + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
            dnew_TV = tl.dot(end_TK, narrow_KV, input_precision=PRECISION)
        else:
            k_TK = load_rows(k + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
            dnew_TV = tl.dot(k_TK, narrow_KV, input_precision=PRECISION)
            dnew_TV *= load_scalars(end_rows + token_head, 0, tokens, HV, C)[:, None]
        dnew_TV += tl.dot(score_TT, do_TV.to(MMA), input_precision=PRECISION)
        if DELTA:
            solve_TT = load_columns(solve + chunk_head * C * C, 0, C, C, 0, C, C, C)
            dv_TV = tl.dot(solve_TT, dnew_TV.to(MMA), input_precision=PRECISION)
        else:
            dv_TV = dnew_TV
        dv_narrow_TV = dv_TV.to(MMA)
        store_rows(grad_v + token_head * V, dv_TV, 0, tokens, HV * V, v_column, V, C, BV)
        if DECAY == "channel":
            c_K = tl.arange(0, KP)
            decay_K = tl.load(chunk_decay + chunk_head * K + c_K, mask=c_K < K, other=0.0)
            q_KT = load_columns(q_decayed + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
            grad_KV = grad_KV * decay_K[:, None] + tl.dot(q_KT, do_TV.to(MMA), input_precision=PRECISION)
            if DELTA:
                k_KT = load_columns(k_decayed + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
                grad_KV -= tl.dot(k_KT, dv_narrow_TV, input_precision=PRECISION)
        else:
            if DECAY == "head":
                grad_KV *= tl.load(chunk_decay + chunk_head)
            q_T = load_scalars(q_rows + token_head, 0, tokens, HV, C)
            q_KT = load_columns(q + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
            grad_KV += tl.dot(q_KT, (do_TV * q_T[:, None]).to(MMA), input_precision=PRECISION)
            if DELTA:
                k_T = load_scalars(k_rows + token_head, 0, tokens, HV, C)
                k_KT = load_columns(k + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
                grad_KV -= tl.dot(k_KT, (dv_TV * k_T[:, None]).to(MMA), input_precision=PRECISION)
    if INITIAL:
        store_rows(grad_initial + state_base, grad_KV, 0, K, V, v_column, V, KP, BV)


@triton.jit(do_not_specialize=["length", "per_sequence"])
def score_gradient_kernel(
    q, v, beta, q_decayed, q_rows, row_decay, scores, states, values, grad_o, grad_v,
    grad_scores, grad_solve, own_grads, q_dots, k_dots, grad_beta, chunks, scale, beta_floor, length, per_sequence,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the two grams of one chunk and head, strictly below the diagonal, and of beta.

    grad_scores = s dO V'^T, grad_solve = -dv V'^T, both times the decay between the rows where it is per head. The
    diagonal of the first is kept apart in fp32 (own_grads): it has no part in dg, and would drown it. With a norm,
    q . dq = dO . o and k . dk = 2 beta dbeta - dv . v come from here, because later the channels are cut.
    """
    chunk = tl.program_id(0)
    hv = tl.program_id(1)
    h = hv // (HV // H)
    start, tokens = chunk_span(chunks, chunk, length, per_sequence, C, PACKED)
    if tokens <= 0:
        return
    chunk_head = chunk.to(tl.int64) * HV + hv
    token_head = start * HV + hv
    MMA: tl.constexpr = q.dtype.element_ty
    i_T1 = tl.arange(0, C)[:, None]
    j_1T = tl.arange(0, C)[None, :]
    dscore_TT = tl.zeros([C, C], tl.float32)
    dsolve_TT = tl.zeros([C, C], tl.float32)
    own_T = tl.zeros([C], tl.float32)
    dv_new_T = tl.zeros([C], tl.float32)
    dv_v_T = tl.zeros([C], tl.float32)
    q_dot_T = tl.zeros([C], tl.float32)
    if L2NORM:
        if DECAY == "channel":
            q_TK = load_rows(q_decayed + token_head * K, 0, tokens, HV * K, 0, K, C, KP)
        else:
            q_TK = load_rows(q + (start * H + h) * K, 0, tokens, H * K, 0, K, C, KP)
            q_T = load_scalars(q_rows + token_head, 0, tokens, HV, C)
    for v_column in range(0, V, BV):
        do_TV = load_rows(grad_o + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(MMA)
        new_TV = load_rows(values + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(tl.float32)
        new_VT = load_columns(values + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(MMA)
        dscore_TT += tl.dot(do_TV, new_VT, input_precision=PRECISION)
        own_T += tl.sum(do_TV * new_TV, axis=1)
        if DELTA or L2NORM:
            dv_TV = load_rows(grad_v + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(MMA)
            v_TV = load_rows(v + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(tl.float32)
            dv_v_T += tl.sum(dv_TV * v_TV, axis=1)
        if DELTA:
            dsolve_TT -= tl.dot(dv_TV, new_VT, input_precision=PRECISION)
            dv_new_T += tl.sum(dv_TV * new_TV, axis=1)
        if L2NORM:
            state_KV = load_state(states + chunk_head * K * V, v_column, K, V, KP, BV)
            past_TV = tl.dot(q_TK, state_KV, input_precision=PRECISION)
            if DECAY != "channel":
                past_TV *= q_T[:, None]
            q_dot_T += tl.sum(past_TV * do_TV, axis=1)
    if L2NORM:
        score_TT = load_rows(scores + chunk_head * C * C, 0, C, C, 0, C, C, C).to(tl.float32)
        q_dot_T += tl.sum(score_TT * dscore_TT, axis=1)
        store_scalars(q_dots + token_head, q_dot_T, 0, tokens, HV, C)
        k_dot_T = dv_v_T
    dscore_TT *= scale
    store_scalars(own_grads + token_head, own_T * scale, 0, tokens, HV, C)
    # rows past the last token hold zeros already: their dO, dv and V' are zero
    mask_TT = i_T1 > j_1T
    if DECAY == "head":
        decay_T = load_scalars(row_decay + token_head, 0, tokens, HV, C)
        between_TT = pair_decay(decay_T, decay_T, mask_TT & (i_T1 < tokens))
        dscore_TT *= between_TT
        dsolve_TT *= between_TT
    store_block(grad_scores + chunk_head * C * C, tl.where(mask_TT, dscore_TT, 0.0), 0, 0, C, C)
    if DELTA:
        store_block(grad_solve + chunk_head * C * C, tl.where(mask_TT, dsolve_TT, 0.0), 0, 0, C, C)
        beta_T = floored_beta(beta + token_head, 0, tokens, HV, beta_floor, C)
        inverse_T = 1.0 / tl.where(beta_T == 0.0, 1.0, beta_T)
        # two divisions: the square of a small beta would vanish
        store_scalars(grad_beta + token_head, dv_new_T * inverse_T * inverse_T, 0, tokens, HV, C)
        if L2NORM:
            k_dot_T = 2.0 * dv_new_T * inverse_T - dv_v_T
    if L2NORM:
        store_scalars(k_dots + token_head, k_dot_T, 0, tokens, HV, C)


@triton.jit
def masked_gram(base, mask_TT, C: tl.constexpr):
    """The entries of a chunk's matrix [C, C] that ``mask`` keeps, straight from memory."""
    r_T = tl.arange(0, C)
    return tl.load(base + r_T[:, None] * C + r_T[None, :], mask=mask_TT, other=0.0)


@triton.jit
def masked_gram_transposed(base, mask_TT, C: tl.constexpr):
    """The transpose of :func:`masked_gram`; ``mask`` is that of the transposed matrix."""
    r_T = tl.arange(0, C)
    return tl.load(base + r_T[:, None] + r_T[None, :] * C, mask=mask_TT, other=0.0)


@triton.jit
def gram_products(
    dq_TK, dk_TK, dg_TK, q_TK, k_TK, rise_TK, fall_TK, grad_scores, grad_solve, mask_TT, mask_t_TT,
    DELTA: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Adds what the grams' entries under ``mask`` give to dq, dk and dG, with e^(G_i - G_j) = rise_i fall_j.

    An entry (i, j) adds the same amount to dG_i as it takes from dG_j. Both are formed from the *rounded* factors, so
    that they cancel exactly in the running sum: the difference of two roundings would drown the gradient of a strong
    decay.
    """
    fallen_TK = (k_TK * fall_TK).to(MMA)
    risen_TK = (q_TK * rise_TK).to(MMA)
    dscore_TT = masked_gram(grad_scores, mask_TT, C)
    row_TK = tl.dot(dscore_TT, fallen_TK, input_precision=PRECISION)
    dq_TK += rise_TK * row_TK
    dg_TK += risen_TK * row_TK
    dscore_t_TT = masked_gram_transposed(grad_scores, mask_t_TT, C)
    column_TK = tl.dot(dscore_t_TT, risen_TK, input_precision=PRECISION)
    if DELTA:
        risen_TK = (k_TK * rise_TK).to(MMA)
        dsolve_TT = masked_gram(grad_solve, mask_TT, C)
        row_TK = tl.dot(dsolve_TT, fallen_TK, input_precision=PRECISION)
        dk_TK += rise_TK * row_TK
        dg_TK += risen_TK * row_TK
        dsolve_t_TT = masked_gram_transposed(grad_solve, mask_t_TT, C)
        column_TK += tl.dot(dsolve_t_TT, risen_TK, input_precision=PRECISION)
    dk_TK += fall_TK * column_TK
    dg_TK -= fallen_TK * column_TK
    return dq_TK, dk_TK, dg_TK


@triton.jit(do_not_specialize=["length", "per_sequence", "tokens_total"])
def gradient_kernel(
    q, k, g, q_norm, k_norm, row_decay, states, grad_states, values, grad_o, grad_v, grad_scores, grad_solve,
    own_grads, q_dots, k_dots, grad_q, grad_k, grad_g, chunks, scale, length, per_sequence, tokens_total,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    LEAF: tl.constexpr, LOG_LEAF: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one chunk, key head and slice of K, summed in fp32 over the key head's value heads.

    dq_i = e^G_i s dO_i S^T + sum_j dP_ij k_j e^(G_i - G_j), and so on (README); dg is the reverse running sum of
    dG_i = q_i dq_i + k_i (dk_row_i - dk_col_i) without the diagonal of dP. With a decay per head, grad_g holds one
    part per slice of K: [slices, tokens, HV].
    """
    slices = tl.cdiv(K, BK)
    chunk = tl.program_id(0) // slices
    column = (tl.program_id(0) % slices) * BK
    h = tl.program_id(1)
    start, tokens = chunk_span(chunks, chunk, length, per_sequence, C, PACKED)
    if tokens <= 0:
        return
    MMA: tl.constexpr = q.dtype.element_ty
    GROUP: tl.constexpr = HV // H
    i_T1 = tl.arange(0, C)[:, None]
    j_1T = tl.arange(0, C)[None, :]
    key_base = (start * H + h) * K
    if L2NORM:
        q_norm += start * H + h
        k_norm += start * H + h
    q_TK = normed_rows(q + key_base, q_norm, 0, tokens, column, H, K, L2NORM, C, BK)
    k_TK = normed_rows(k + key_base, k_norm, 0, tokens, column, H, K, L2NORM, C, BK)
    dq_sum_TK = tl.zeros([C, BK], tl.float32)
    dk_sum_TK = tl.zeros([C, BK], tl.float32)
    q_dot_T = tl.zeros([C], tl.float32)
    k_dot_T = tl.zeros([C], tl.float32)
    for member in range(0, GROUP):
        hv = h * GROUP + member
        chunk_head = chunk.to(tl.int64) * HV + hv
        token_head = start * HV + hv
        dq_TK = tl.zeros([C, BK], tl.float32)
        dk_row_TK = tl.zeros([C, BK], tl.float32)
        dk_end_TK = tl.zeros([C, BK], tl.float32)
        carried_K = tl.zeros([BK], tl.float32)
        for v_column in range(0, V, BV):
            do_TV = load_rows(grad_o + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(MMA)
            state_VK = load_columns(states + chunk_head * K * V, column, K, V, v_column, V, BK, BV)
            dq_TK += tl.dot(do_TV, state_VK, input_precision=PRECISION)
            if DELTA:
                dv_TV = load_rows(grad_v + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(MMA)
                dk_row_TK -= tl.dot(dv_TV, state_VK, input_precision=PRECISION)
            new_TV = load_rows(values + token_head * V, 0, tokens, HV * V, v_column, V, C, BV).to(MMA)
            dstate_VK = load_columns(grad_states + chunk_head * K * V, column, K, V, v_column, V, BK, BV)
            dk_end_TK += tl.dot(new_TV, dstate_VK, input_precision=PRECISION)
            if DECAY != "none":
                carried_K += tl.sum(state_VK.to(tl.float32) * dstate_VK.to(tl.float32), axis=0)
        dq_TK *= scale
        if DECAY == "channel":
            g_TK = load_rows(g + token_head * K, 0, tokens, HV * K, column, K, C, BK).to(tl.float32)
            through_TK, past_TK = segment_decay(g_TK, C, C, BK)
            through_TK = tl.exp(through_TK)
            dq_TK *= through_TK
            dk_row_TK *= through_TK
            dk_end_TK *= tl.exp(past_TK)
            carried_K *= tl.exp(tl.sum(g_TK, axis=0))
        if DECAY == "head":
            through_T = load_scalars(row_decay + token_head, 0, tokens, HV, C)
            # the last token's row holds the whole chunk's decay
            total = tl.sum(tl.where(tl.arange(0, C) == tokens - 1, through_T, 0.0), axis=0)
            past_T = tl.where(tl.arange(0, C) < tokens, total - through_T, 0.0)
            dq_TK *= tl.exp(through_T)[:, None]
            dk_row_TK *= tl.exp(through_T)[:, None]
            dk_end_TK *= tl.exp(past_T)[:, None]
            carried_K *= tl.exp(total)
        dk_TK = dk_row_TK + dk_end_TK
        # what the state carries past the chunk: every step of the chunk has a part in it
        carried_K += tl.sum(k_TK * dk_end_TK, axis=0)
        dg_TK = q_TK * dq_TK + k_TK * (dk_row_TK - dk_end_TK)
        dscore = grad_scores + chunk_head * C * C
        dsolve = grad_solve
        if DELTA:
            dsolve += chunk_head * C * C
        if DECAY == "channel":
            for level in tl.static_range(LOG_LEAF, LOG_C):
                factor_TK = half_factor(g_TK, 1 << level, C, BK)
                mask_TT = half_mask(i_T1, j_1T, 1 << level)
                mask_t_TT = half_mask(j_1T, i_T1, 1 << level)
                dq_TK, dk_TK, dg_TK = gram_products(
                    dq_TK, dk_TK, dg_TK, q_TK, k_TK, factor_TK, factor_TK, dscore, dsolve, mask_TT, mask_t_TT,
                    DELTA, MMA, PRECISION, C,
                )  # fmt: skip
            if LEAF > 1:
                decay_TK = leaf_factor(g_TK, LEAF, C, BK)
                mask_TT = leaf_mask(i_T1, j_1T, LEAF)
                mask_t_TT = leaf_mask(j_1T, i_T1, LEAF)
                dq_TK, dk_TK, dg_TK = gram_products(
                    dq_TK, dk_TK, dg_TK, q_TK, k_TK, tl.exp(decay_TK), tl.exp(-decay_TK), dscore, dsolve,
                    mask_TT, mask_t_TT, DELTA, MMA, PRECISION, C,
                )  # fmt: skip
            dg_TK = tl.cumsum(dg_TK, axis=0, reverse=True) + carried_K[None, :]
            store_rows(grad_g + token_head * K, dg_TK, 0, tokens, HV * K, column, K, C, BK)
        else:
            # the grams' gradients hold the decay between the rows already
            one_TK = tl.full([C, BK], 1.0, tl.float32)
            mask_TT = (i_T1 >= 0) & (j_1T >= 0)
            dq_TK, dk_TK, dg_TK = gram_products(
                dq_TK, dk_TK, dg_TK, q_TK, k_TK, one_TK, one_TK, dscore, dsolve, mask_TT, mask_TT,
                DELTA, MMA, PRECISION, C,
            )  # fmt: skip
            if DECAY == "head":
                dg_T = tl.cumsum(tl.sum(dg_TK, axis=1), axis=0, reverse=True) + tl.sum(carried_K, axis=0)
                part = (tl.program_id(0) % slices).to(tl.int64) * tokens_total * HV
                store_scalars(grad_g + part + token_head, dg_T, 0, tokens, HV, C)
        own_T = load_scalars(own_grads + token_head, 0, tokens, HV, C)
        dq_sum_TK += dq_TK + own_T[:, None] * k_TK
        dk_sum_TK += dk_TK + own_T[:, None] * q_TK
        if L2NORM:
            q_dot_T += load_scalars(q_dots + token_head, 0, tokens, HV, C)
            k_dot_T += load_scalars(k_dots + token_head, 0, tokens, HV, C)
    if L2NORM:
        q_scale_T = load_scalars(q_norm, 0, tokens, H, C)
        k_scale_T = load_scalars(k_norm, 0, tokens, H, C)
        dq_sum_TK = q_scale_T[:, None] * (dq_sum_TK - q_TK * q_dot_T[:, None])
        dk_sum_TK = k_scale_T[:, None] * (dk_sum_TK - k_TK * k_dot_T[:, None])
    store_rows(grad_q + key_base, dq_sum_TK, 0, tokens, H * K, column, K, C, BK)
    store_rows(grad_k + key_base, dk_sum_TK, 0, tokens, H * K, column, K, C, BK)


# ---- host ----------------------------------------------------------------------------------------------------------


def padded(size):
    """The tile width for ``size`` channels: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def leaf_rows(dtype):
    """Rows of a block whose decays are taken relative to its middle row.

    bf16 reaches e^80, and e^-10 is below its resolution. fp32 needs e^-20 for that, fp16 overflows past e^11: it
    halves down to single rows.
    """
    if dtype == torch.bfloat16:
        return 16
    return 8 if dtype == torch.float32 else 1


def smallest_beta(dtype):
    """What a beta of 0 is computed as: invisible beside the dtype's rounding, and its multiples still numbers."""
    return 2.0**-13 if dtype == torch.float16 else 1e-15


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


def outputs_like(tensors, spec, config):
    """Empty outputs and the tensors kept for the backward: the two matrices [chunks, HV, C, C]."""
    q, v, cu_seqlens = tensors["q"], tensors["v"], tensors.get("cu_seqlens")
    heads, value_dim = v.shape[2], v.shape[3]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunk = config["chunk"]
    chunks = chunk_count(tensors, chunk)
    outputs = {
        "o": torch.empty_like(v, memory_format=torch.contiguous_format),
        "final_state": q.new_empty((sequences, heads, q.shape[3], value_dim), dtype=torch.float32),
    }
    saved = {"scores": q.new_empty((chunks, heads, chunk, chunk))}
    if spec.delta:
        saved["solve"] = q.new_empty((chunks, heads, chunk, chunk))
    return outputs, saved


def prepare(tensors, spec, config, chunks, scale):
    """Run ``prepare_kernel``; its tensors by name, absent ones None. Shared by forward and backward."""
    q, k, g = tensors["q"], tensors["k"], tensors.get("g")
    batch, length, key_heads, key_dim = q.shape
    heads = tensors["v"].shape[2]
    chunk = config["chunk"]
    count = chunk_count(tensors, chunk)
    made = {
        "q_norm": None, "k_norm": None, "q_decayed": None, "k_decayed": None, "k_ending": None,
        "row_decay": None, "q_rows": None, "k_rows": None, "end_rows": None, "chunk_decay": None,
    }  # fmt: skip
    if spec.qk_l2norm:
        made["q_norm"] = q.new_empty((batch, length, key_heads), dtype=torch.float32)
        made["k_norm"] = torch.empty_like(made["q_norm"])
    if spec.decay == "channel":
        made["q_decayed"] = q.new_empty((batch, length, heads, key_dim))
        made["k_decayed"] = torch.empty_like(made["q_decayed"])
        made["k_ending"] = torch.empty_like(made["q_decayed"])
        made["chunk_decay"] = q.new_empty((count, heads, key_dim), dtype=torch.float32)
    else:
        made["q_rows"] = q.new_empty((batch, length, heads), dtype=torch.float32)
        made["k_rows"] = torch.empty_like(made["q_rows"])
        made["end_rows"] = torch.empty_like(made["q_rows"])
        if spec.decay == "head":
            made["row_decay"] = torch.empty_like(made["q_rows"])
            made["chunk_decay"] = q.new_empty((count, heads), dtype=torch.float32)
    prepare_kernel[(count, heads)](
        q, k, g, chunks, made["q_norm"], made["k_norm"], made["q_decayed"], made["k_decayed"], made["k_ending"],
        made["row_decay"], made["q_rows"], made["k_rows"], made["end_rows"], made["chunk_decay"],
        scale, length, triton.cdiv(length, chunk),
        H=key_heads, HV=heads, K=key_dim, C=chunk, KP=padded(key_dim),
        DECAY=spec.decay, L2NORM=spec.qk_l2norm, PACKED=chunks is not None,
        num_warps=config["prepare_warps"],
    )  # fmt: skip
    return made


def forward(tensors, spec, config):
    """o [B, T, HV, V] and the final states [N, HV, K, V]; keeps the two matrices of every chunk."""
    outputs, saved = outputs_like(tensors, spec, config)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    g, beta, initial_state = tensors.get("g"), tensors.get("beta"), tensors.get("initial_state")
    cu_seqlens = tensors.get("cu_seqlens")
    batch, length, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2], v.shape[3]
    final_state = outputs["final_state"]
    if q.numel() == 0 or v.numel() == 0:
        if initial_state is None:
            final_state.zero_()
        else:
            final_state.copy_(initial_state)
        return outputs, saved
    chunk = config["chunk"]
    count = chunk_count(tensors, chunk)
    per_sequence = triton.cdiv(length, chunk)
    scale = spec.scale if spec.scale is not None else key_dim**-0.5
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    rows = min(config["rows"], chunk)
    leaf = min(leaf_rows(q.dtype), rows)
    chunks, offsets = None, None
    if cu_seqlens is not None:
        chunks, offsets = chunk_table(cu_seqlens, length, chunk)
    made = prepare(tensors, spec, config, chunks, scale)
    gram_kernel[(count, heads)](
        q, k, g, beta, chunks, made["q_norm"], made["k_norm"], made["row_decay"], saved["scores"], saved.get("solve"),
        scale, smallest_beta(q.dtype), length, per_sequence,
        H=key_heads, HV=heads, K=key_dim, C=chunk, R=rows, LOG_R=rows.bit_length() - 1,
        LEAF=leaf, LOG_LEAF=leaf.bit_length() - 1, BK=min(config["gram_bk"], padded(key_dim)),
        DECAY=spec.decay, DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None, PRECISION=precision,
        num_warps=config["gram_warps"], num_stages=config["gram_stages"],
    )  # fmt: skip
    block = min(config["scan_bv"], padded(value_dim))
    scan_kernel[(final_state.shape[0] * heads * triton.cdiv(value_dim, block),)](
        q, k, v, made["q_decayed"], made["k_decayed"], made["k_ending"], made["q_rows"], made["k_rows"],
        made["end_rows"], made["chunk_decay"], saved["scores"], saved.get("solve"), initial_state,
        outputs["o"], final_state, None, None, chunks, offsets, length, per_sequence,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, KP=padded(key_dim), BV=block,
        DECAY=spec.decay, DELTA=spec.delta, PACKED=cu_seqlens is not None, INITIAL=initial_state is not None,
        OUTPUT=True, PRECISION=precision,
        num_warps=config["scan_warps"], num_stages=config["scan_stages"],
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
    count = chunk_count(tensors, chunk)
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
    made = prepare(tensors, spec, config, chunks, scale)
    states = q.new_empty((count, heads, key_dim, value_dim))
    values = v
    if spec.delta:
        values = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    block = min(config["scan_bv"], padded(value_dim))
    scan_kernel[(sequences * heads * triton.cdiv(value_dim, block),)](
        q, k, v, made["q_decayed"], made["k_decayed"], made["k_ending"], made["q_rows"], made["k_rows"],
        made["end_rows"], made["chunk_decay"], saved["scores"], saved.get("solve"), initial_state,
        None, None, states, values, chunks, offsets, length, per_sequence,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, KP=key_tile, BV=block,
        DECAY=spec.decay, DELTA=spec.delta, PACKED=cu_seqlens is not None, INITIAL=initial_state is not None,
        OUTPUT=False, PRECISION=precision,
        num_warps=config["scan_warps"], num_stages=config["scan_stages"],
    )  # fmt: skip
    grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    grad_states = torch.empty_like(states)
    block = min(config["reverse_bv"], padded(value_dim))
    reverse_kernel[(sequences * heads * triton.cdiv(value_dim, block),)](
        q, k, made["q_decayed"], made["k_decayed"], made["k_ending"], made["q_rows"], made["k_rows"],
        made["end_rows"], made["chunk_decay"], saved["scores"], saved.get("solve"), grad_o, grad_final,
        grad_v, grad_states, grad_initial, chunks, offsets, length, per_sequence,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, KP=key_tile, BV=block,
        DECAY=spec.decay, DELTA=spec.delta, PACKED=cu_seqlens is not None, FINAL=grad_final is not None,
        INITIAL=initial_state is not None, PRECISION=precision,
        num_warps=config["reverse_warps"], num_stages=config["reverse_stages"],
    )  # fmt: skip
    grad_scores = torch.empty_like(saved["scores"])
    own_grads = q.new_empty((batch, length, heads), dtype=torch.float32)
    grad_solve, grad_beta, q_dots, k_dots = None, None, None, None
    if spec.delta:
        grad_solve = torch.empty_like(saved["solve"])
        grad_beta = torch.empty_like(beta, memory_format=torch.contiguous_format)
    if spec.qk_l2norm:
        q_dots = torch.empty_like(own_grads)
        k_dots = torch.empty_like(own_grads)
    score_gradient_kernel[(count, heads)](
        q, v, beta, made["q_decayed"], made["q_rows"], made["row_decay"], saved["scores"], states, values, grad_o,
        grad_v, grad_scores, grad_solve, own_grads, q_dots, k_dots, grad_beta, chunks,
        scale, smallest_beta(q.dtype), length, per_sequence,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, KP=key_tile,
        BV=min(config["score_bv"], padded(value_dim)),
        DECAY=spec.decay, DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None, PRECISION=precision,
        num_warps=config["score_warps"], num_stages=config["score_stages"],
    )  # fmt: skip
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    block = min(config["gradient_bk"], key_tile)
    slices = triton.cdiv(key_dim, block)
    grad_g = None
    if spec.decay == "channel":
        grad_g = torch.empty_like(g, memory_format=torch.contiguous_format)
    if spec.decay == "head":
        grad_g = q.new_empty((slices, batch, length, heads), dtype=torch.float32)
    gradient_kernel[(slices * count, key_heads)](
        q, k, g, made["q_norm"], made["k_norm"], made["row_decay"], states, grad_states, values, grad_o, grad_v,
        grad_scores, grad_solve, own_grads, q_dots, k_dots, grad_q, grad_k, grad_g, chunks,
        scale, length, per_sequence, batch * length,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, C=chunk, LOG_C=chunk.bit_length() - 1,
        LEAF=leaf, LOG_LEAF=leaf.bit_length() - 1, BK=block, BV=min(config["gradient_bv"], padded(value_dim)),
        DECAY=spec.decay, DELTA=spec.delta, L2NORM=spec.qk_l2norm, PACKED=cu_seqlens is not None, PRECISION=precision,
        num_warps=config["gradient_warps"], num_stages=config["gradient_stages"],
    )  # fmt: skip
    found = {"q": grad_q, "k": grad_k, "v": grad_v, "initial_state": grad_initial}
    if spec.decay == "channel":
        found["g"] = grad_g
    if spec.decay == "head":
        found["g"] = grad_g.sum(0).to(g.dtype)
    if spec.delta:
        found["beta"] = grad_beta
    return {name: found[name] for name in needs}


def bucket(tensors, spec):
    """The sizes by which a configuration is chosen."""
    q, v = tensors["q"], tensors["v"]
    return {
        "tokens": q.shape[0] * q.shape[1], "heads": v.shape[2], "key_dim": q.shape[3], "value_dim": v.shape[3],
    }  # fmt: skip
