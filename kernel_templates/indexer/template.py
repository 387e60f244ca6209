"""The lightning indexer: scores of all visible keys, the K best of each query, and the gradient of the chosen scores.

Scores never exist all at once: a chunk of queries is scored into one workspace, selected from, and overwritten.

    forward   score_kernel     I[t, s] of some queries x heads (columns of one product) against blocks of keys
              narrow_kernel    of long rows: a threshold from a sample, and the keys above it in order
              select_kernel    the exact K-th largest score by bisection over the bits of its order-preserving key,
                               then the chosen keys in ascending order
    backward  mark_kernel      for each key one bit a query: who chose it
              offsets_kernel   how many chose a key, and how many of them come before each run of 32 queries
              gradient_kernel  of one query, over its chosen keys: the products again, dq, dweights, and what each key
                               gets, written to the key's own run of rows, in the order of queries
              add_kernel       sums those runs
    objective_kernel, objective_gradient_kernel: KL(p || softmax(I)) over chosen keys
compression_kernel, compression_gradient_kernel: keys of pools of tokens

The choice is exact and the same in every run. A sample that misleads (many equal scores) costs time, not exactness:
then the bisection reads the whole row. No float is ever added atomically.

Registers never feed a matrix product from the left: on Hopper such operands may be overwritten while they are read.

Legend: M a block of keys, N columns (queries x heads, padded), D channels, H heads (padded), J slots, C candidates,
R rows; suffixes name a tile's axes.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def visible(begin_ptr, end_ptr, row, T):
    """First key that a query sees, and how many it sees."""
    begin = tl.minimum(tl.maximum(tl.load(begin_ptr + row), 0), T)
    end = tl.minimum(tl.load(end_ptr + row), T)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def score_kernel(
    q_ptr, k_ptr, weights_ptr, begin_ptr, end_ptr, space_ptr,
    first, S, T, D, stride, scale,
    HEADS: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
    QUERIES: tl.constexpr, H: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = QUERIES * H
    blocks = tl.cdiv(S, QUERIES)
    block = first + tl.program_id(0)
    batch = (block // blocks).to(tl.int64)
    query = (block % blocks) * QUERIES
    at_Q = query + tl.arange(0, QUERIES)
    exists_Q = at_Q < S
    begin_Q = tl.load(begin_ptr + batch * S + at_Q, mask=exists_Q, other=2147483647)
    end_Q = tl.load(end_ptr + batch * S + at_Q, mask=exists_Q, other=0)
    lowest = tl.maximum(tl.min(begin_Q, axis=0), 0)
    highest = tl.minimum(tl.max(end_Q, axis=0), T)
    start = tl.maximum(lowest // M * M, tl.program_id(1) * SPLIT)
    stop = tl.minimum(highest, (tl.program_id(1) + 1) * SPLIT)
    if start < stop:
        d_D = tl.arange(0, PADDED_D)
        column_N = tl.arange(0, N)
        head_N = column_N % H
        inside_N = (head_N < HEADS) & (query + column_N // H < S)
        row_N = (batch * S + query + column_N // H) * HEADS + head_N
        q_DN = tl.load(
            q_ptr + row_N[None, :] * D + d_D[:, None], mask=inside_N[None, :] & (d_D < D)[:, None], other=0.0
        )
        if WEIGHTED:
            weight_N = tl.load(weights_ptr + row_N, mask=inside_N, other=0.0).to(tl.float32)
        row_Q = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
        k_ptr += batch * T * D
        for key in tl.range(start, stop, M, num_stages=STAGES):
            key_M = key + tl.arange(0, M)
            k_MD = tl.load(
                k_ptr + key_M[:, None] * D + d_D[None, :],
                mask=(key_M < T)[:, None] & (d_D < D)[None, :], other=0.0,
            )  # fmt: skip
            z_MN = tl.dot(k_MD, q_DN, input_precision="ieee")
            if ACTIVATION == "relu":
                z_MN = tl.maximum(z_MN, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if WEIGHTED:
                z_MN *= weight_N[None, :]
            # the scale comes last: scores of exactly representable inputs stay exact, equal ones equal
            score_MQ = tl.sum(tl.reshape(z_MN, (M, QUERIES, H)), axis=2) * scale
            tl.store(
                space_ptr + row_Q[None, :] * stride + key_M[:, None], score_MQ,
                mask=(key_M < T)[:, None] & exists_Q[None, :],
            )  # fmt: skip


@triton.jit
def ordered(score, exists):
    """Integers that order as the scores do: both zeros equal, NaN as minus infinity, what is not there below."""
    score = tl.where(score == score, score, -float("inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(exists, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def largest(key_C, rank):
    """The ``rank``-th largest of a tile of keys: the largest value that so many keys reach, bit by bit."""
    value = tl.where(tl.sum((key_C >= 0).to(tl.int32), axis=0) >= rank, 0, -2147483648)
    for step in range(31):
        larger = value | (1 << (30 - step))
        value = tl.where(tl.sum((key_C >= larger).to(tl.int32), axis=0) >= rank, larger, value)
    return value


@triton.jit
def narrow_kernel(
    space_ptr, begin_ptr, end_ptr, place_ptr, found_ptr,
    first, S, T, K, stride,
    QUERIES: tl.constexpr, SAMPLE: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of a long row that may be among the K best, in order: all that reach a value that about 1.3 K of them do."""
    local = tl.program_id(0)
    blocks = tl.cdiv(S, QUERIES)
    block = first + local // QUERIES
    query = (block % blocks) * QUERIES + local % QUERIES
    if query < S:
        begin, n = visible(begin_ptr, end_ptr, (block // blocks).to(tl.int64) * S + query, T)
        if (n > K) & (n > CANDIDATES):
            space_ptr += local.to(tl.int64) * stride + begin
            place_ptr += local.to(tl.int64) * CANDIDATES
            share = K.to(tl.float32) / n.to(tl.float32) * SAMPLE
            rank = tl.minimum(share + 4.0 * tl.sqrt(share) + 4.0, SAMPLE).to(tl.int32)
            # evenly spread: scores often depend on the distance to the query
            at_C = (tl.arange(0, SAMPLE).to(tl.int64) * n // SAMPLE).to(tl.int32)
            score_C = tl.load(space_ptr + at_C)
            least = largest(ordered(score_C, score_C == score_C), rank)
            found = 0
            for start in range(0, n, BLOCK):
                at_B = start + tl.arange(0, BLOCK)
                key_B = ordered(tl.load(space_ptr + at_B, mask=at_B < n, other=0.0), at_B < n)
                kept_B = ((key_B >= least) & (at_B < n)).to(tl.int32)
                to_B = found + tl.cumsum(kept_B, axis=0) - 1
                tl.store(place_ptr + to_B, at_B, mask=(kept_B != 0) & (to_B < CANDIDATES))
                found += tl.sum(kept_B, axis=0)
            tl.store(found_ptr + local, found)


@triton.jit
def reached(space_ptr, n, value, BLOCK: tl.constexpr):
    """How many of a row's keys reach a value."""
    count_B = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        key_B = ordered(tl.load(space_ptr + at_B, mask=at_B < n, other=0.0), at_B < n)
        count_B += (key_B >= value).to(tl.int32)
    return tl.sum(count_B, axis=0)


@triton.jit
def select_kernel(
    space_ptr, begin_ptr, end_ptr, place_ptr, found_ptr, scores_ptr, index_ptr, count_ptr,
    first, S, T, K, stride,
    QUERIES: tl.constexpr, NARROWED: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # long rows come first: the last of a causal sequence
    local = tl.num_programs(0) - 1 - tl.program_id(0)
    blocks = tl.cdiv(S, QUERIES)
    block = first + local // QUERIES
    query = (block % blocks) * QUERIES + local % QUERIES
    if query < S:
        row = (block // blocks).to(tl.int64) * S + query
        begin, n = visible(begin_ptr, end_ptr, row, T)
        space_ptr += local.to(tl.int64) * stride + begin
        scores_ptr += row * K
        index_ptr += row * K
        tl.store(count_ptr + row, tl.minimum(n, K))
        # candidates: all keys of a short row; of a long one those that narrow_kernel found, if it found a fit number
        candidates = n
        listed = False
        if NARROWED:
            if (n > K) & (n > CANDIDATES):
                candidates = tl.load(found_ptr + local)
                listed = (candidates >= K) & (candidates <= CANDIDATES)
        if n <= K:
            for start in range(0, K, BLOCK):
                at_B = start + tl.arange(0, BLOCK)
                score_B = tl.load(space_ptr + at_B, mask=at_B < n, other=0.0)
                tl.store(scores_ptr + at_B, score_B, mask=at_B < K)
                tl.store(index_ptr + at_B, tl.where(at_B < n, begin + at_B, -1), mask=at_B < K)
        elif listed | (n <= CANDIDATES):
            slot_C = tl.arange(0, CANDIDATES)
            exists_C = slot_C < candidates
            at_C = slot_C
            if NARROWED:
                place_ptr += local.to(tl.int64) * CANDIDATES
                at_C = tl.where(listed, tl.load(place_ptr + slot_C, mask=exists_C & listed, other=0), slot_C)
            score_C = tl.load(space_ptr + at_C, mask=exists_C, other=0.0)
            key_C = ordered(score_C, exists_C)
            value = largest(key_C, K)
            above_C = (key_C > value).to(tl.int32)
            equal_C = (key_C == value).to(tl.int32)
            ties = K - tl.sum(above_C, axis=0)
            kept_C = above_C + tl.where(tl.cumsum(equal_C, axis=0) <= ties, equal_C, 0)
            to_C = tl.cumsum(kept_C, axis=0) - 1
            tl.store(scores_ptr + to_C, score_C, mask=kept_C != 0)
            tl.store(index_ptr + to_C, begin + at_C, mask=kept_C != 0)
        else:
            value = tl.where(reached(space_ptr, n, 0, BLOCK) >= K, 0, -2147483648)
            for step in range(31):
                larger = value | (1 << (30 - step))
                value = tl.where(reached(space_ptr, n, larger, BLOCK) >= K, larger, value)
            # nothing exceeds the largest integer, and no score is it
            ties = K - reached(space_ptr, n, value + 1, BLOCK)
            taken = 0
            found = 0
            for start in range(0, n, BLOCK):
                at_B = start + tl.arange(0, BLOCK)
                score_B = tl.load(space_ptr + at_B, mask=at_B < n, other=0.0)
                key_B = ordered(score_B, at_B < n)
                equal_B = (key_B == value).to(tl.int32)
                kept_B = (key_B > value).to(tl.int32) + tl.where(taken + tl.cumsum(equal_B, axis=0) <= ties, equal_B, 0)
                to_B = found + tl.cumsum(kept_B, axis=0) - 1
                tl.store(scores_ptr + to_B, score_B, mask=kept_B != 0)
                tl.store(index_ptr + to_B, begin + at_B, mask=kept_B != 0)
                taken += tl.sum(equal_B, axis=0)
                found += tl.sum(kept_B, axis=0)


@triton.jit
def mark_kernel(index_ptr, count_ptr, words_ptr, first, S, T, K, keys, BLOCK: tl.constexpr):
    """Sets bit t % 32 of words[t / 32, s] for every chosen key s of query t; the order of queries does not matter."""
    local = tl.program_id(0)
    row = (first + local).to(tl.int64)
    count = tl.load(count_ptr + row)
    base = row // S * T + (local // 32).to(tl.int64) * keys
    for start in range(0, count, BLOCK):
        slot_B = start + tl.arange(0, BLOCK)
        key_B = tl.load(index_ptr + row * K + slot_B, mask=slot_B < count, other=0)
        bit_B = tl.zeros((BLOCK,), tl.int32) + (1 << (local % 32))
        tl.atomic_or(words_ptr + base + key_B, bit_B, mask=slot_B < count, sem="relaxed")


@triton.jit
def ones(word):
    """Bits that are set in 32-bit words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def offsets_kernel(words_ptr, before_ptr, total_ptr, groups, keys, BLOCK: tl.constexpr):
    key_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum_B = tl.zeros((BLOCK,), tl.int32)
    for group in range(0, groups):
        at_B = tl.cast(group, tl.int64) * keys + key_B
        tl.store(before_ptr + at_B, sum_B, mask=key_B < keys)
        sum_B += ones(tl.load(words_ptr + at_B, mask=key_B < keys, other=0))
    tl.store(total_ptr + key_B, sum_B, mask=key_B < keys)


@triton.jit
def gradient_kernel(
    dscores_ptr, q_ptr, k_ptr, weights_ptr, index_ptr, count_ptr, words_ptr, before_ptr, start_ptr,
    dq_ptr, dweights_ptr, part_ptr,
    first, S, T, K, D, keys, scale,
    HEADS: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
    Q_GRADIENT: tl.constexpr, K_GRADIENT: tl.constexpr, WEIGHTS_GRADIENT: tl.constexpr,
    H: tl.constexpr, PADDED_D: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    local = tl.program_id(0)
    row = (first + local).to(tl.int64)
    count = tl.load(count_ptr + row)
    batch = row // S
    head_H = tl.arange(0, H)
    d_D = tl.arange(0, PADDED_D)
    at_DH = (row * HEADS + head_H)[None, :] * D + d_D[:, None]
    inside_DH = (head_H < HEADS)[None, :] & (d_D < D)[:, None]
    q_HD = tl.load(
        q_ptr + (row * HEADS + head_H)[:, None] * D + d_D[None, :],
        mask=(head_H < HEADS)[:, None] & (d_D < D)[None, :], other=0.0,
    )  # fmt: skip
    if K_GRADIENT:
        q_DH = tl.load(q_ptr + at_DH, mask=inside_DH, other=0.0)
    if WEIGHTED:
        weight_H = tl.load(weights_ptr + row * HEADS + head_H, mask=head_H < HEADS, other=0.0).to(tl.float32)
    if Q_GRADIENT:
        dq_DH = tl.zeros((PADDED_D, H), tl.float32)
    if WEIGHTS_GRADIENT:
        dweight_H = tl.zeros((H,), tl.float32)
    k_ptr += batch * T * D
    for start in tl.range(0, count, J, num_stages=STAGES):
        slot_J = start + tl.arange(0, J)
        used_J = slot_J < count
        key_J = tl.load(index_ptr + row * K + slot_J, mask=used_J, other=0)
        g_J = tl.load(dscores_ptr + row * K + slot_J, mask=used_J, other=0.0).to(tl.float32) * scale
        k_DJ = tl.load(
            k_ptr + key_J[None, :] * D + d_D[:, None],
            mask=used_J[None, :] & (d_D < D)[:, None], other=0.0,
        )  # fmt: skip
        z_HJ = tl.dot(q_HD, k_DJ, input_precision="ieee")
        dz_HJ = tl.zeros((H, J), tl.float32) + g_J[None, :]
        if WEIGHTS_GRADIENT:
            act_HJ = z_HJ
            if ACTIVATION == "relu":
                act_HJ = tl.maximum(z_HJ, 0.0, propagate_nan=tl.PropagateNan.ALL)
            dweight_H += tl.sum(act_HJ * dz_HJ, axis=1)
        if WEIGHTED:
            dz_HJ *= weight_H[:, None]
        if ACTIVATION == "relu":
            dz_HJ = tl.where(z_HJ > 0.0, dz_HJ, 0.0)
        narrow_HJ = dz_HJ.to(k_ptr.dtype.element_ty)
        if Q_GRADIENT:
            dq_DH += tl.dot(k_DJ, tl.trans(narrow_HJ), input_precision="ieee")
        if K_GRADIENT:
            part_DJ = tl.dot(q_DH, narrow_HJ, input_precision="ieee")
            # behind what the queries before this one gave to the same key
            at_J = (local // 32).to(tl.int64) * keys + batch * T + key_J
            word_J = tl.load(words_ptr + at_J, mask=used_J, other=0)
            rank_J = tl.load(before_ptr + at_J, mask=used_J, other=0) + ones(word_J & ((1 << (local % 32)) - 1))
            to_J = tl.load(start_ptr + batch * T + key_J, mask=used_J, other=0) + rank_J
            tl.store(
                part_ptr + to_J.to(tl.int64)[None, :] * D + d_D[:, None], part_DJ.to(part_ptr.dtype.element_ty),
                mask=used_J[None, :] & (d_D < D)[:, None],
            )  # fmt: skip
    if Q_GRADIENT:
        tl.store(dq_ptr + at_DH, dq_DH.to(dq_ptr.dtype.element_ty), mask=inside_DH)
    if WEIGHTS_GRADIENT:
        tl.store(dweights_ptr + row * HEADS + head_H, dweight_H.to(dweights_ptr.dtype.element_ty), mask=head_H < HEADS)


@triton.jit
def add_kernel(part_ptr, start_ptr, total_ptr, dk_ptr, keys, D, R: tl.constexpr, PADDED_D: tl.constexpr):
    """Adds to dk, in fp32, what the queries of this chunk gave to a key."""
    key = tl.program_id(0).to(tl.int64)
    total = tl.load(total_ptr + key)
    if total > 0:
        base = tl.load(start_ptr + key).to(tl.int64)
        d_D = tl.arange(0, PADDED_D)
        sum_D = tl.load(dk_ptr + key * D + d_D, mask=d_D < D, other=0.0)
        for start in range(0, total, R):
            at_R = start + tl.arange(0, R)
            part_RD = tl.load(
                part_ptr + (base + at_R)[:, None] * D + d_D[None, :],
                mask=(at_R < total)[:, None] & (d_D < D)[None, :], other=0.0,
            )  # fmt: skip
            sum_D += tl.sum(part_RD.to(tl.float32), axis=0)
        tl.store(dk_ptr + key * D + d_D, sum_D, mask=d_D < D)


@triton.jit
def objective_kernel(
    scores_ptr, target_ptr, count_ptr, loss_ptr, normaliser_ptr, mass_ptr, N, K,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    count_R = tl.load(count_ptr + row_R, mask=row_R < N, other=0)
    most_R = tl.full((R,), -float("inf"), tl.float32)
    sum_R = tl.zeros((R,), tl.float32)
    mass_RB = tl.zeros((R, BLOCK), tl.float32)
    longest = tl.max(count_R, axis=0)
    for start in range(0, longest, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        used_RB = at_B[None, :] < count_R[:, None]
        score_RB = tl.load(scores_ptr + row_R[:, None] * K + at_B[None, :], mask=used_RB, other=-float("inf"))
        mass_RB += tl.load(target_ptr + row_R[:, None] * K + at_B[None, :], mask=used_RB, other=0.0).to(tl.float32)
        now_R = tl.maximum(most_R, tl.max(score_RB, axis=1))
        safe_R = tl.where(now_R > -float("inf"), now_R, 0.0)
        sum_R = sum_R * tl.exp(most_R - safe_R) + tl.sum(tl.exp(score_RB - safe_R[:, None]), axis=1)
        most_R = now_R
    # added up here: Triton 3.6 cannot compile a sum of sums that is used twice
    mass_R = tl.sum(mass_RB, axis=1)
    normaliser_R = tl.where(sum_R > 0.0, most_R + tl.log(sum_R), 0.0)
    loss_R = tl.zeros((R,), tl.float32)
    for start in range(0, longest, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        used_RB = at_B[None, :] < count_R[:, None]
        score_RB = tl.load(scores_ptr + row_R[:, None] * K + at_B[None, :], mask=used_RB, other=0.0)
        p_RB = tl.load(target_ptr + row_R[:, None] * K + at_B[None, :], mask=used_RB, other=0.0).to(tl.float32)
        p_RB /= tl.where(mass_R > 0.0, mass_R, 1.0)[:, None]
        # p log p is 0 at 0
        log_RB = tl.log(tl.where(p_RB > 0.0, p_RB, 1.0))
        loss_R += tl.sum(tl.where(p_RB > 0.0, p_RB * (log_RB - (score_RB - normaliser_R[:, None])), 0.0), axis=1)
    tl.store(loss_ptr + row_R, loss_R, mask=row_R < N)
    tl.store(normaliser_ptr + row_R, normaliser_R, mask=row_R < N)
    tl.store(mass_ptr + row_R, mass_R, mask=row_R < N)


@triton.jit
def objective_gradient_kernel(
    dloss_ptr, scores_ptr, target_ptr, count_ptr, normaliser_ptr, mass_ptr, dscores_ptr, N, K,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count_R = tl.load(count_ptr + row_R, mask=row_R < N, other=0)
    mass_R = tl.load(mass_ptr + row_R, mask=row_R < N, other=0.0)
    normaliser_R = tl.load(normaliser_ptr + row_R, mask=row_R < N, other=0.0)
    dloss_R = tl.load(dloss_ptr + row_R, mask=row_R < N, other=0.0).to(tl.float32)
    used_RB = at_B[None, :] < count_R[:, None]
    at_RB = row_R[:, None] * K + at_B[None, :]
    score_RB = tl.load(scores_ptr + at_RB, mask=used_RB, other=-float("inf"))
    p_RB = tl.load(target_ptr + at_RB, mask=used_RB, other=0.0).to(tl.float32)
    weighs_R = mass_R > 0.0
    p_RB /= tl.where(weighs_R, mass_R, 1.0)[:, None]
    gradient_RB = (tl.exp(score_RB - normaliser_R[:, None]) - p_RB) * tl.where(weighs_R, dloss_R, 0.0)[:, None]
    gradient_RB = tl.where(used_RB, gradient_RB, 0.0)
    tl.store(dscores_ptr + at_RB, gradient_RB, mask=(row_R < N)[:, None] & (at_B < K)[None, :])


@triton.jit
def shares_of(gate_ptr, bias_RD, first, D, inside_RD, R: tl.constexpr, PADDED_D: tl.constexpr):
    """softmax over the tokens of a pool, for each channel."""
    at_RD = (first + tl.arange(0, R))[:, None] * D + tl.arange(0, PADDED_D)[None, :]
    logit_RD = tl.load(gate_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32) + bias_RD
    # channels that do not exist have zeros throughout, so that nothing there divides by zero
    token_R = tl.sum(inside_RD.to(tl.int32), axis=1) > 0
    logit_RD = tl.where(token_R[:, None], logit_RD, -float("inf"))
    e_RD = tl.exp(logit_RD - tl.max(logit_RD, axis=0)[None, :])
    return e_RD / tl.sum(e_RD, axis=0)[None, :]


@triton.jit
def compression_kernel(
    k_ptr, gate_ptr, bias_ptr, start_ptr, pooled_ptr, P, T, D, SIZE,
    R: tl.constexpr, PADDED_D: tl.constexpr,
):  # fmt: skip
    pool = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + pool)
    at_R, at_D = tl.arange(0, R), tl.arange(0, PADDED_D)
    inside_RD = (at_R < SIZE)[:, None] & (at_D < D)[None, :]
    pooled_D = tl.zeros((PADDED_D,), tl.float32)
    if (start >= 0) & (start + SIZE <= T):
        first = pool // P * T + start
        bias_RD = tl.load(bias_ptr + at_R[:, None] * D + at_D[None, :], mask=inside_RD, other=0.0).to(tl.float32)
        share_RD = shares_of(gate_ptr, bias_RD, first, D, inside_RD, R, PADDED_D)
        k_RD = tl.load(k_ptr + (first + at_R)[:, None] * D + at_D[None, :], mask=inside_RD, other=0.0).to(tl.float32)
        pooled_D = tl.sum(share_RD * k_RD, axis=0)
    tl.store(pooled_ptr + pool * D + at_D, pooled_D.to(pooled_ptr.dtype.element_ty), mask=at_D < D)


@triton.jit
def compression_gradient_kernel(
    dpooled_ptr, k_ptr, gate_ptr, bias_ptr, start_ptr, dk_ptr, dgate_ptr, dbias_ptr, pools, P, T, D, SIZE,
    R: tl.constexpr, PADDED_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at_R, at_D = tl.arange(0, R), tl.arange(0, PADDED_D)
    inside_RD = (at_R < SIZE)[:, None] & (at_D < D)[None, :]
    bias_RD = tl.load(bias_ptr + at_R[:, None] * D + at_D[None, :], mask=inside_RD, other=0.0).to(tl.float32)
    dbias_RD = tl.zeros((R, PADDED_D), tl.float32)
    for number in range(program, pools, tl.num_programs(0)):
        pool = tl.cast(number, tl.int64)
        start = tl.load(start_ptr + pool)
        if (start >= 0) & (start + SIZE <= T):
            first = pool // P * T + start
            at_RD = (first + at_R)[:, None] * D + at_D[None, :]
            share_RD = shares_of(gate_ptr, bias_RD, first, D, inside_RD, R, PADDED_D)
            k_RD = tl.load(k_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
            d_D = tl.load(dpooled_ptr + pool * D + at_D, mask=at_D < D, other=0.0).to(tl.float32)
            dk_RD = share_RD * d_D[None, :]
            dgate_RD = dk_RD * (k_RD - tl.sum(share_RD * k_RD, axis=0)[None, :])
            tl.store(dk_ptr + at_RD, dk_RD.to(dk_ptr.dtype.element_ty), mask=inside_RD)
            tl.store(dgate_ptr + at_RD, dgate_RD.to(dgate_ptr.dtype.element_ty), mask=inside_RD)
            dbias_RD += dgate_RD
    at_RD = (program.to(tl.int64) * SIZE + at_R)[:, None] * D + at_D[None, :]
    tl.store(dbias_ptr + at_RD, dbias_RD, mask=inside_RD)


def traits(spec):
    """Backward of a selection reads the choice, which is an output."""
    if spec.operation != "selection":
        return {}
    return {"saved_outputs": ("index", "count"), "unread_inputs": ("begin", "end", "slots")}


def bucket(tensors, spec):
    """Configurations depend on the sizes and on whether products run in fp32."""
    if spec.operation == "objective":
        return {"top_k": tensors["scores"].shape[-1]}
    if spec.operation == "compression":
        return {"pool": tensors["bias"].shape[0]}
    return {
        "heads": tensors["q"].shape[2],
        "keys": tensors["k"].shape[1],
        "top_k": tensors["slots"].shape[0],
        "fp32": 65536 if tensors["q"].dtype == torch.float32 else 1,
    }


def outputs_like(tensors, spec, config):
    """Empty scores [B, S, K] fp32, index [B, S, K] and count [B, S] int32; or loss [B, S] and its rows' sums, fp32."""
    if spec.operation == "objective":
        scores = tensors["scores"]
        outputs = {"loss": scores.new_empty(scores.shape[:-1], dtype=torch.float32)}
        saved = {name: torch.empty_like(outputs["loss"]) for name in ("normaliser", "mass")}
        return outputs, saved
    if spec.operation == "compression":
        k = tensors["k"]
        return {"pooled": k.new_empty((*tensors["start"].shape, k.shape[-1]))}, {}
    q = tensors["q"]
    rows, slots = q.shape[:2], tensors["slots"].shape[0]
    index = q.new_empty((*rows, slots), dtype=torch.int32)
    count = q.new_empty(rows, dtype=torch.int32)
    scores = q.new_empty((*rows, slots), dtype=torch.float32)
    return {"scores": scores, "index": index, "count": count}, {"index": index, "count": count}


def queries_of(heads, config):
    """Queries whose heads fill the columns of one product, and heads padded to a power of two."""
    padded = triton.next_power_of_2(heads)
    return max(1, max(16, config["score_columns"]) // padded), padded


def forward(tensors, spec, config):
    """The outputs, and what backward needs."""
    outputs, saved = outputs_like(tensors, spec, config)
    if spec.operation == "objective":
        slots = tensors["scores"].shape[-1]
        rows = tensors["count"].numel()
        if rows > 0:
            objective_kernel[(triton.cdiv(rows, config["objective_rows"]),)](
                tensors["scores"], tensors["target"], tensors["count"],
                outputs["loss"], saved["normaliser"], saved["mass"], rows, slots,
                R=config["objective_rows"], BLOCK=config["objective_block"], num_warps=config["objective_warps"],
            )  # fmt: skip
        return outputs, saved
    if spec.operation == "compression":
        k, bias, start = tensors["k"], tensors["bias"], tensors["start"]
        if outputs["pooled"].numel() > 0:
            compression_kernel[(start.numel(),)](
                k, tensors["gate"], bias, start, outputs["pooled"],
                start.shape[1], k.shape[1], k.shape[2], bias.shape[0],
                R=triton.next_power_of_2(bias.shape[0]), PADDED_D=triton.next_power_of_2(k.shape[2]),
                num_warps=config["pool_warps"],
            )  # fmt: skip
        return outputs, saved
    q, k = tensors["q"], tensors["k"]
    batches, length, heads, dim = q.shape
    keys, slots = k.shape[1], tensors["slots"].shape[0]
    if q.numel() == 0 or slots == 0 or keys == 0:
        outputs["scores"].zero_()
        outputs["index"].fill_(-1)
        outputs["count"].zero_()
        return outputs, saved
    queries, padded = queries_of(heads, config)
    stride = triton.cdiv(keys, 32) * 32
    blocks = batches * triton.cdiv(length, queries)
    # one workspace of scores, used again and again: what is written is read before it leaves the cache
    chunk = min(blocks, max(1, config["workspace_kib"] * 256 // (stride * queries)))
    rows = chunk * queries
    space = q.new_empty((rows, stride), dtype=torch.float32)
    candidates = config["candidates"]
    narrowed = keys > candidates and 3 * slots < 2 * candidates
    place = q.new_empty((rows, candidates), dtype=torch.int32) if narrowed else None
    found = q.new_empty(rows, dtype=torch.int32) if narrowed else None
    for first in range(0, blocks, chunk):
        count = min(chunk, blocks - first)
        score_kernel[(count, triton.cdiv(keys, config["score_split"]))](
            q, k, tensors["weights"] if spec.weighted else None, tensors["begin"], tensors["end"], space,
            first, length, keys, dim, stride, dim**-0.5,
            HEADS=heads, WEIGHTED=spec.weighted, ACTIVATION=spec.activation,
            QUERIES=queries, H=padded, M=config["score_keys"], PADDED_D=max(16, triton.next_power_of_2(dim)),
            SPLIT=config["score_split"], STAGES=config["score_stages"], num_warps=config["score_warps"],
        )  # fmt: skip
        if narrowed:
            narrow_kernel[(count * queries,)](
                space, tensors["begin"], tensors["end"], place, found,
                first, length, keys, slots, stride,
                QUERIES=queries, SAMPLE=config["sample"], CANDIDATES=candidates, BLOCK=config["scan_block"],
                num_warps=config["narrow_warps"],
            )  # fmt: skip
        select_kernel[(count * queries,)](
            space, tensors["begin"], tensors["end"], place, found,
            outputs["scores"], outputs["index"], outputs["count"],
            first, length, keys, slots, stride,
            QUERIES=queries, NARROWED=narrowed, CANDIDATES=candidates, BLOCK=config["scan_block"],
            num_warps=config["select_warps"],
        )  # fmt: skip
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; without a gradient of the scores there are none."""
    if spec.operation == "objective":
        scores = tensors["scores"]
        slots = scores.shape[-1]
        rows = tensors["count"].numel()
        dscores = torch.empty_like(scores)
        if dscores.numel() > 0:
            grid = (triton.cdiv(rows, config["objective_rows"]), triton.cdiv(slots, config["objective_block"]))
            objective_gradient_kernel[grid](
                grads["loss"], scores, tensors["target"], tensors["count"], saved["normaliser"], saved["mass"],
                dscores, rows, slots,
                R=config["objective_rows"], BLOCK=config["objective_block"], num_warps=config["objective_warps"],
            )  # fmt: skip
        return {"scores": dscores}
    if spec.operation == "compression":
        k, bias, start = tensors["k"], tensors["bias"], tensors["start"]
        # tokens of no pool have no gradient
        dk, dgate = torch.zeros_like(k), torch.zeros_like(tensors["gate"])
        programs = min(start.numel(), config["pool_programs"])
        dbias = k.new_zeros((programs, *bias.shape), dtype=torch.float32)
        if programs > 0 and bias.numel() > 0:
            compression_gradient_kernel[(programs,)](
                grads["pooled"], k, tensors["gate"], bias, start, dk, dgate, dbias,
                start.numel(), start.shape[1], k.shape[1], k.shape[2], bias.shape[0],
                R=triton.next_power_of_2(bias.shape[0]), PADDED_D=triton.next_power_of_2(k.shape[2]),
                num_warps=config["pool_warps"],
            )  # fmt: skip
        return {"k": dk, "gate": dgate, "bias": dbias.sum(0).to(bias.dtype)}
    dscores = grads["scores"]
    if dscores is None:
        return {}
    q, k = tensors["q"], tensors["k"]
    batches, length, heads, dim = q.shape
    keys, slots = k.shape[1], dscores.shape[-1]
    rows = batches * length
    key_gradient = "k" in needs
    weights_gradient = spec.weighted and "weights" in needs
    dq = torch.empty_like(q) if "q" in needs else None
    dweights = torch.empty_like(tensors["weights"]) if weights_gradient else None
    # chunks of queries add to it, one after another
    dk = k.new_zeros(k.shape, dtype=torch.float32) if key_gradient else None
    total_keys = batches * keys
    words = before = total = starts = part = None
    chunk = max(1, rows)
    if key_gradient and q.numel() > 0 and slots > 0 and keys > 0:
        fitting = config["partial_kib"] * 1024 // max(1, min(slots, keys) * dim * k.element_size())
        chunk = min(triton.cdiv(rows, 32) * 32, max(32, fitting // 32 * 32))
        words = q.new_empty((chunk // 32, total_keys), dtype=torch.int32)
        before = torch.empty_like(words)
        total = q.new_empty(total_keys, dtype=torch.int32)
        part = k.new_empty((chunk * min(slots, keys), dim))
    padded_dim = max(16, triton.next_power_of_2(dim))
    for first in range(0, rows if q.numel() > 0 and slots > 0 and keys > 0 else 0, chunk):
        count = min(chunk, rows - first)
        if key_gradient:
            groups = triton.cdiv(count, 32)
            words.zero_()
            mark_kernel[(count,)](
                saved["index"], saved["count"], words, first, length, keys, slots, total_keys,
                BLOCK=config["mark_block"], num_warps=config["mark_warps"],
            )  # fmt: skip
            offsets_kernel[(triton.cdiv(total_keys, config["offset_keys"]),)](
                words, before, total, groups, total_keys, BLOCK=config["offset_keys"], num_warps=config["mark_warps"],
            )  # fmt: skip
            starts = total.cumsum(0) - total
        gradient_kernel[(count,)](
            dscores, q, k, tensors["weights"] if spec.weighted else None, saved["index"], saved["count"],
            words, before, starts, dq, dweights, part,
            first, length, keys, slots, dim, total_keys, dim**-0.5,
            HEADS=heads, WEIGHTED=spec.weighted, ACTIVATION=spec.activation,
            Q_GRADIENT="q" in needs, K_GRADIENT=key_gradient, WEIGHTS_GRADIENT=weights_gradient,
            H=max(16, triton.next_power_of_2(heads)), PADDED_D=padded_dim,
            J=config["gradient_slots"], STAGES=config["gradient_stages"], num_warps=config["gradient_warps"],
        )  # fmt: skip
        if key_gradient:
            add_kernel[(total_keys,)](
                part, starts, total, dk, total_keys, dim,
                R=config["add_rows"], PADDED_D=padded_dim, num_warps=config["add_warps"],
            )  # fmt: skip
    gradients = {}
    if "q" in needs:
        gradients["q"] = dq if rows > 0 and keys > 0 and slots > 0 else torch.zeros_like(q)
    if key_gradient:
        gradients["k"] = dk.to(k.dtype)
    if weights_gradient:
        gradients["weights"] = dweights if rows > 0 and keys > 0 and slots > 0 else torch.zeros_like(tensors["weights"])
    return gradients
