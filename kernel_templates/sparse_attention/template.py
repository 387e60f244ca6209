"""Attention over a list of selected keys: gathered forward, and a backward in five ordered steps.

Row t of the list names the keys that query t sees; heads of a group share the key head and so every gathered row.
Scores are computed with keys as rows, S^T = K Q^T, and the output as O^T = V^T P^T: the operand that is made in
registers (P^T) is always the second one, which travels through shared memory, and sixteen heads fill a product as
well as sixty-four.

Backward, over chunks of queries so that its memory is bounded: (a) delta = <do, o>; (b) P and dS by slot, with heads
contiguous; (c) dq = dS K; (d) the gradient of every slot's key, P^T do + dS^T q, stored in the storage dtype; (e) each
key adds up its slots, in order, found through a stable sort of the lists. No product has an operand from registers in
(c) and (d), nothing is added atomically, two runs are bitwise equal. Where order does not matter (d) adds to the
keys' gradients with fp32 atomics and (e) is not run.

Legend: T queries, S keys, G key heads (groups) of HEADS query heads each, K slots of a list, L lists a query (1 or G),
D columns of q and k, R rotary columns, V value columns. Suffixes of tiles: _J slots, _H heads, _D, _R and _V columns,
_C a block of columns, _E entries of a key.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SINK_PROGRAMS = 128  # partial sums of the sinks' gradients
SINK_HEADS = 64  # heads a program sums
LOWEST = tl.constexpr(-3.0e38)  # below every score: differences to it are finite or infinite, never NaN


@triton.jit
def _selected(
    index_ptr,
    row,
    first,
    count,
    keys,
    group,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Rows s G + g of k that BLOCK_J slots of a list from ``first`` on name, 0 for none; and which are keys at all.

    FAR: elements of k pass 2^31, so that offsets are 64 bits wide; a gather keeps many of them in registers.
    """
    slot_J = first + tl.arange(0, BLOCK_J)
    key_J = tl.load(index_ptr + row * SLOTS + slot_J, mask=slot_J < count, other=-1)
    valid_J = (key_J >= 0) & (key_J < keys)
    row_J = tl.where(valid_J, key_J, 0).to(tl.int64 if FAR else tl.int32) * GROUPS + group
    return tl.where(valid_J, row_J, 0), valid_J


@triton.jit
def _gathered(ptr, row_J, valid_J, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``first`` .. of the rows [BLOCK_J, BLOCK]; rows that are no key are zeros, whatever row 0 holds."""
    at_C = first + tl.arange(0, BLOCK)
    if WIDTH % BLOCK == 0:
        tile_JC = tl.load(ptr + row_J[:, None] * WIDTH + at_C[None, :], mask=valid_J[:, None], other=0.0)
    else:
        inside_JC = valid_J[:, None] & (at_C < WIDTH)[None, :]
        tile_JC = tl.load(ptr + row_J[:, None] * WIDTH + at_C[None, :], mask=inside_JC, other=0.0)
    return tile_JC


@triton.jit
def _head_rows(
    ptr, row, first_head, first, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows [BLOCK_H, BLOCK] of a tensor [.., HEADS, WIDTH] whose first head of the group is at ``row``."""
    head_H = first_head + tl.arange(0, BLOCK_H)
    at_C = first + tl.arange(0, BLOCK)
    at_HC = head_H[:, None] * WIDTH + at_C[None, :]
    if HEADS % BLOCK_H == 0 and WIDTH % BLOCK == 0:
        tile_HC = tl.load(ptr + row * WIDTH + at_HC)
    else:
        tile_HC = tl.load(
            ptr + row * WIDTH + at_HC, mask=(head_H < HEADS)[:, None] & (at_C < WIDTH)[None, :], other=0.0
        )
    return tile_HC


@triton.jit
def _count_kernel(index_ptr, count_ptr, keys, SLOTS: tl.constexpr, BLOCK_J: tl.constexpr):
    """How many slots of a list must be looked at: one past its last key."""
    row = tl.program_id(0).to(tl.int64)
    last_J = tl.zeros((BLOCK_J,), tl.int32)
    for first in range(0, SLOTS, BLOCK_J):
        slot_J = first + tl.arange(0, BLOCK_J)
        key_J = tl.load(index_ptr + row * SLOTS + slot_J, mask=slot_J < SLOTS, other=-1)
        last_J = tl.where((key_J >= 0) & (key_J < keys), slot_J + 1, last_J)
    tl.store(count_ptr + row, tl.max(last_J, axis=0))


@triton.jit
def _store_rows(ptr, row, head_H, first, o_VH, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``first`` .. of the heads' rows of a tensor [.., HEADS, WIDTH] = the transpose of o [BLOCK, BLOCK_H]."""
    at_V = first + tl.arange(0, BLOCK)
    at_HV = head_H[:, None] * WIDTH + at_V[None, :]
    o_HV = tl.trans(o_VH.to(ptr.dtype.element_ty))
    tl.store(ptr + row * WIDTH + at_HV, o_HV, mask=(head_H < HEADS)[:, None] & (at_V < WIDTH)[None, :])


@triton.jit(do_not_specialize=["tokens", "keys"])
def _forward_kernel(
    q_ptr,
    q_rope_ptr,
    k_ptr,
    k_rope_ptr,
    v_ptr,
    index_ptr,
    count_ptr,
    sink_ptr,
    o_ptr,
    lse_ptr,
    tokens,
    keys,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    ROPE: tl.constexpr,
    SEPARATE: tl.constexpr,
    SINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALVES: tl.constexpr,
):
    """o [T, H, V] and lse [T, H] in base 2 (+inf for a row without keys and sink); ``scale`` carries log2(e).

    HALVES: wide keys come as two tiles of columns (the second one's names end in 2), which spares registers.
    """
    PART_D: tl.constexpr = BLOCK_D // 2 if HALVES else BLOCK_D
    PART_V: tl.constexpr = BLOCK_V // 2 if HALVES else BLOCK_V
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    # the last queries have the longest lists: they start first
    token = (tokens - 1 - program // (GROUPS * HEAD_BLOCKS)).to(tl.int64)
    group = program // HEAD_BLOCKS % GROUPS
    first_head = program % HEAD_BLOCKS * BLOCK_H
    head_H = first_head + tl.arange(0, BLOCK_H)
    row = (token * GROUPS + group) * HEADS
    listed = token * LISTS + group % LISTS
    count = tl.load(count_ptr + listed)

    q_HD = _head_rows(q_ptr, row, first_head, 0, HEADS, D, BLOCK_H, PART_D)
    if HALVES:
        q2_HD = _head_rows(q_ptr, row, first_head, PART_D, HEADS, D, BLOCK_H, PART_D)
        o2_VH = tl.zeros((PART_V, BLOCK_H), tl.float32)
    if ROPE:
        q_HR = _head_rows(q_rope_ptr, row, first_head, 0, HEADS, R, BLOCK_H, BLOCK_R)
    top_H = tl.full((BLOCK_H,), LOWEST, tl.float32)
    sum_H = tl.zeros((BLOCK_H,), tl.float32)
    o_VH = tl.zeros((PART_V, BLOCK_H), tl.float32)
    for first in range(0, count, BLOCK_J):
        row_J, valid_J = _selected(index_ptr, listed, first, count, keys, group, GROUPS, SLOTS, FAR, BLOCK_J)
        k_JD = _gathered(k_ptr, row_J, valid_J, 0, D, PART_D)
        s_JH = tl.dot(k_JD, tl.trans(q_HD), input_precision="ieee")
        if HALVES:
            k2_JD = _gathered(k_ptr, row_J, valid_J, PART_D, D, PART_D)
            s_JH = tl.dot(k2_JD, tl.trans(q2_HD), s_JH, input_precision="ieee")
        if ROPE:
            k_JR = _gathered(k_rope_ptr, row_J, valid_J, 0, R, BLOCK_R)
            s_JH = tl.dot(k_JR, tl.trans(q_HR), s_JH, input_precision="ieee")
        s_JH = tl.where(valid_J[:, None], s_JH * scale, -float("inf"))
        new_H = tl.maximum(top_H, tl.max(s_JH, axis=0))
        shrink_H = tl.exp2(top_H - new_H)
        p_JH = tl.exp2(s_JH - new_H[None, :])
        sum_H = sum_H * shrink_H + tl.sum(p_JH, axis=0)
        o_VH = o_VH * shrink_H[None, :]
        if SEPARATE:
            v_JV = _gathered(v_ptr, row_J, valid_J, 0, V, BLOCK_V)
            o_VH = tl.dot(tl.trans(v_JV), p_JH.to(v_JV.dtype), o_VH, input_precision="ieee")
        else:
            o_VH = tl.dot(tl.trans(k_JD), p_JH.to(k_JD.dtype), o_VH, input_precision="ieee")
            if HALVES:
                o2_VH *= shrink_H[None, :]
                o2_VH = tl.dot(tl.trans(k2_JD), p_JH.to(k_JD.dtype), o2_VH, input_precision="ieee")
        top_H = new_H

    # zero, but unknown to the compiler: it would keep q's offsets through the loop to store o at the same ones
    zero = tl.load(count_ptr + listed) - count
    head_H ^= zero
    if SINK:
        sink_H = tl.load(sink_ptr + group * HEADS + head_H, mask=head_H < HEADS, other=0.0).to(tl.float32) * LOG2E
        new_H = tl.maximum(top_H, sink_H)
        shrink_H = tl.exp2(top_H - new_H)
        sum_H = sum_H * shrink_H + tl.exp2(sink_H - new_H)
        top_H = new_H
    else:
        shrink_H = tl.full((BLOCK_H,), 1.0, tl.float32)
    empty_H = sum_H == 0.0
    total_H = tl.where(empty_H, 1.0, sum_H)
    lse_H = tl.where(empty_H, float("inf"), top_H + tl.log2(total_H))
    tl.store(lse_ptr + row + head_H, lse_H, mask=head_H < HEADS)
    factor_H = shrink_H / total_H
    _store_rows(o_ptr, row, head_H, 0, o_VH * factor_H[None, :], HEADS, V, PART_V)
    if HALVES:
        _store_rows(o_ptr, row, head_H, PART_V, o2_VH * factor_H[None, :], HEADS, V, PART_V)


@triton.jit
def _slots_by_head(
    ptr, row, first, count, first_head, HEADS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_H: tl.constexpr
):
    """P or dS [BLOCK_J, BLOCK_H] of a list's slots; what is not there is zero."""
    slot_J = first + tl.arange(0, BLOCK_J)
    head_H = first_head + tl.arange(0, BLOCK_H)
    at_JH = slot_J[:, None] * HEADS + head_H[None, :]
    if HEADS % BLOCK_H == 0:
        tile_JH = tl.load(ptr + row * HEADS + at_JH, mask=(slot_J < count)[:, None], other=0.0)
    else:
        tile_JH = tl.load(
            ptr + row * HEADS + at_JH, mask=(slot_J < count)[:, None] & (head_H < HEADS)[None, :], other=0.0
        )
    return tile_JH


@triton.jit
def _products(k_JD, q_HD, sum_JH, BLOCK_H: tl.constexpr):
    """k q^T + sum [BLOCK_J, BLOCK_H]; heads are the product's rows where they fill them, so that fewer keys do."""
    if BLOCK_H % 64 == 0:
        found_JH = tl.trans(tl.dot(q_HD, tl.trans(k_JD), tl.trans(sum_JH), input_precision="ieee"))
    else:
        found_JH = tl.dot(k_JD, tl.trans(q_HD), sum_JH, input_precision="ieee")
    return found_JH


@triton.jit(do_not_specialize=["start", "tokens", "keys"])
def _weights_kernel(
    q_ptr,
    q_rope_ptr,
    k_ptr,
    k_rope_ptr,
    index_ptr,
    count_ptr,
    sink_ptr,
    p_ptr,
    shrink_ptr,
    factor_ptr,
    lse_ptr,
    start,
    tokens,
    keys,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    ROPE: tl.constexpr,
    SINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """First half of a forward in two: e^(s - m) [tokens, G, K, HEADS] of the queries from ``start`` on, and lse [T, H].

    m is the largest score up to and with a slot's tile: ``shrink`` [tokens, G, tiles, HEADS] takes what was summed
    before a tile to the tile's m, ``factor`` [tokens, G, HEADS] the whole sum to the output. ``scale`` carries log2(e).
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    TILES: tl.constexpr = (SLOTS + BLOCK_J - 1) // BLOCK_J
    program = tl.program_id(0)
    local = (tokens - 1 - program // (GROUPS * HEAD_BLOCKS)).to(tl.int64)
    token = start + local
    group = program // HEAD_BLOCKS % GROUPS
    first_head = program % HEAD_BLOCKS * BLOCK_H
    head_H = first_head + tl.arange(0, BLOCK_H)
    row = (token * GROUPS + group) * HEADS
    place = local * GROUPS + group
    listed = token * LISTS + group % LISTS
    count = tl.load(count_ptr + listed)
    q_HD = _head_rows(q_ptr, row, first_head, 0, HEADS, D, BLOCK_H, BLOCK_D)
    if ROPE:
        q_HR = _head_rows(q_rope_ptr, row, first_head, 0, HEADS, R, BLOCK_H, BLOCK_R)
    top_H = tl.full((BLOCK_H,), LOWEST, tl.float32)
    sum_H = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(0, count, BLOCK_J):
        row_J, valid_J = _selected(index_ptr, listed, first, count, keys, group, GROUPS, SLOTS, FAR, BLOCK_J)
        slot_J = first + tl.arange(0, BLOCK_J)
        k_JD = _gathered(k_ptr, row_J, valid_J, 0, D, BLOCK_D)
        s_JH = _products(k_JD, q_HD, tl.zeros((BLOCK_J, BLOCK_H), tl.float32), BLOCK_H)
        if ROPE:
            k_JR = _gathered(k_rope_ptr, row_J, valid_J, 0, R, BLOCK_R)
            s_JH = _products(k_JR, q_HR, s_JH, BLOCK_H)
        s_JH = tl.where(valid_J[:, None], s_JH * scale, -float("inf"))
        new_H = tl.maximum(top_H, tl.max(s_JH, axis=0))
        shrink_H = tl.exp2(top_H - new_H)
        p_JH = tl.exp2(s_JH - new_H[None, :])
        sum_H = sum_H * shrink_H + tl.sum(p_JH, axis=0)
        top_H = new_H
        at_JH = slot_J[:, None] * HEADS + head_H[None, :]
        inside_JH = (slot_J < count)[:, None] & (head_H < HEADS)[None, :]
        tl.store(p_ptr + place * SLOTS * HEADS + at_JH, p_JH.to(p_ptr.dtype.element_ty), mask=inside_JH)
        tl.store(shrink_ptr + (place * TILES + first // BLOCK_J) * HEADS + head_H, shrink_H, mask=head_H < HEADS)
    if SINK:
        sink_H = tl.load(sink_ptr + group * HEADS + head_H, mask=head_H < HEADS, other=0.0).to(tl.float32) * LOG2E
        new_H = tl.maximum(top_H, sink_H)
        shrink_H = tl.exp2(top_H - new_H)
        sum_H = sum_H * shrink_H + tl.exp2(sink_H - new_H)
        top_H = new_H
    else:
        shrink_H = tl.full((BLOCK_H,), 1.0, tl.float32)
    empty_H = sum_H == 0.0
    total_H = tl.where(empty_H, 1.0, sum_H)
    lse_H = tl.where(empty_H, float("inf"), top_H + tl.log2(total_H))
    tl.store(lse_ptr + row + head_H, lse_H, mask=head_H < HEADS)
    tl.store(factor_ptr + place * HEADS + head_H, shrink_H / total_H, mask=head_H < HEADS)


@triton.jit(do_not_specialize=["start", "tokens", "keys"])
def _values_kernel(
    p_ptr,
    shrink_ptr,
    factor_ptr,
    v_ptr,
    index_ptr,
    count_ptr,
    o_ptr,
    start,
    tokens,
    keys,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Second half: o [T, H, V], one block of columns a program, of what ``_weights_kernel`` left for its tiles."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    COLUMN_BLOCKS: tl.constexpr = (V + BLOCK_C - 1) // BLOCK_C
    TILES: tl.constexpr = (SLOTS + BLOCK_J - 1) // BLOCK_J
    program = tl.program_id(0)
    first_column = program % COLUMN_BLOCKS * BLOCK_C
    first_head = program // COLUMN_BLOCKS % HEAD_BLOCKS * BLOCK_H
    group = program // (COLUMN_BLOCKS * HEAD_BLOCKS) % GROUPS
    local = (tokens - 1 - program // (COLUMN_BLOCKS * HEAD_BLOCKS * GROUPS)).to(tl.int64)
    token = start + local
    place = local * GROUPS + group
    listed = token * LISTS + group % LISTS
    count = tl.load(count_ptr + listed)
    head_H = first_head + tl.arange(0, BLOCK_H)
    o_HC = tl.zeros((BLOCK_H, BLOCK_C), tl.float32)
    for first in range(0, count, BLOCK_J):
        row_J, valid_J = _selected(index_ptr, listed, first, count, keys, group, GROUPS, SLOTS, FAR, BLOCK_J)
        p_JH = _slots_by_head(p_ptr, place * SLOTS, first, count, first_head, HEADS, BLOCK_J, BLOCK_H)
        at_H = (place * TILES + first // BLOCK_J) * HEADS + head_H
        shrink_H = tl.load(shrink_ptr + at_H, mask=head_H < HEADS, other=0.0)
        v_JC = _gathered(v_ptr, row_J, valid_J, first_column, V, BLOCK_C)
        o_HC = tl.dot(tl.trans(p_JH), v_JC, o_HC * shrink_H[:, None], input_precision="ieee")
    factor_H = tl.load(factor_ptr + place * HEADS + head_H, mask=head_H < HEADS, other=0.0)
    column_C = first_column + tl.arange(0, BLOCK_C)
    at_HC = head_H[:, None] * V + column_C[None, :]
    inside_HC = (head_H < HEADS)[:, None] & (column_C < V)[None, :]
    o_HC *= factor_H[:, None]
    tl.store(o_ptr + (token * GROUPS + group) * HEADS * V + at_HC, o_HC.to(o_ptr.dtype.element_ty), mask=inside_HC)


@triton.jit(do_not_specialize=["rows"])
def _delta_kernel(do_ptr, o_ptr, delta_ptr, rows, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """(a) delta [T H] = <do, o> of each head's row."""
    row_H = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_V = tl.arange(0, BLOCK_V)
    at_HV = row_H[:, None] * V + column_V[None, :]
    inside_HV = (row_H < rows)[:, None] & (column_V < V)[None, :]
    do_HV = tl.load(do_ptr + at_HV, mask=inside_HV, other=0.0).to(tl.float32)
    o_HV = tl.load(o_ptr + at_HV, mask=inside_HV, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row_H, tl.sum(do_HV * o_HV, axis=1), mask=row_H < rows)


@triton.jit(do_not_specialize=["tokens"])
def _sink_kernel(
    sink_ptr, lse_ptr, delta_ptr, partial_ptr, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """A program's share of dsink [H] = -sum over queries of e^(sink - lse) delta; HEADS of all groups here."""
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    sink_H = tl.load(sink_ptr + head_H, mask=head_H < HEADS, other=0.0).to(tl.float32) * LOG2E
    sum_H = tl.zeros((BLOCK_H,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at_RH = row_R[:, None] * HEADS + head_H[None, :]
        inside_RH = (row_R < tokens)[:, None] & (head_H < HEADS)[None, :]
        lse_RH = tl.load(lse_ptr + at_RH, mask=inside_RH, other=float("inf"))
        delta_RH = tl.load(delta_ptr + at_RH, mask=inside_RH, other=0.0)
        sum_H -= tl.sum(tl.exp2(sink_H[None, :] - lse_RH) * delta_RH, axis=0)
    tl.store(partial_ptr + tl.program_id(0) * HEADS + head_H, sum_H, mask=head_H < HEADS)


@triton.jit(do_not_specialize=["start", "tokens", "all_tokens", "keys"])
def _slot_kernel(
    q_ptr,
    q_rope_ptr,
    k_ptr,
    k_rope_ptr,
    v_ptr,
    index_ptr,
    count_ptr,
    lse_ptr,
    do_ptr,
    delta_ptr,
    p_ptr,
    ds_ptr,
    target_ptr,
    start,
    tokens,
    all_tokens,
    keys,
    scale,
    log2_scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    ROPE: tl.constexpr,
    SEPARATE: tl.constexpr,
    TARGET: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """(b) P and dS [tokens, G, K, HEADS] of the queries from ``start`` on; or P's sum over a block of heads.

    target [head blocks of a list, T, L, K] fp32. Slots behind a list's count are not written.
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    local = (tokens - 1 - program // (GROUPS * HEAD_BLOCKS)).to(tl.int64)
    token = start + local
    group = program // HEAD_BLOCKS % GROUPS
    block = program % HEAD_BLOCKS
    first_head = block * BLOCK_H
    head_H = first_head + tl.arange(0, BLOCK_H)
    row = (token * GROUPS + group) * HEADS
    listed = token * LISTS + group % LISTS
    count = tl.load(count_ptr + listed)

    q_HD = _head_rows(q_ptr, row, first_head, 0, HEADS, D, BLOCK_H, BLOCK_D)
    if ROPE:
        q_HR = _head_rows(q_rope_ptr, row, first_head, 0, HEADS, R, BLOCK_H, BLOCK_R)
    # a head that is not there: exp2 of minus infinity
    lse_H = tl.load(lse_ptr + row + head_H, mask=head_H < HEADS, other=float("inf"))
    if GRADIENT:
        do_HV = _head_rows(do_ptr, row, first_head, 0, HEADS, V, BLOCK_H, BLOCK_V)
        delta_H = tl.load(delta_ptr + row + head_H, mask=head_H < HEADS, other=0.0)
    for first in range(0, count, BLOCK_J):
        row_J, valid_J = _selected(index_ptr, listed, first, count, keys, group, GROUPS, SLOTS, FAR, BLOCK_J)
        slot_J = first + tl.arange(0, BLOCK_J)
        k_JD = _gathered(k_ptr, row_J, valid_J, 0, D, BLOCK_D)
        s_JH = _products(k_JD, q_HD, tl.zeros((BLOCK_J, BLOCK_H), tl.float32), BLOCK_H)
        if ROPE:
            k_JR = _gathered(k_rope_ptr, row_J, valid_J, 0, R, BLOCK_R)
            s_JH = _products(k_JR, q_HR, s_JH, BLOCK_H)
        p_JH = tl.where(valid_J[:, None], tl.exp2(s_JH * log2_scale - lse_H[None, :]), 0.0)
        if TARGET:
            at_J = ((group // LISTS * HEAD_BLOCKS + block) * tl.cast(all_tokens, tl.int64) * LISTS + listed) * SLOTS
            tl.store(target_ptr + at_J + slot_J, tl.sum(p_JH, axis=1), mask=slot_J < count)
        if GRADIENT:
            if SEPARATE:
                v_JV = _gathered(v_ptr, row_J, valid_J, 0, V, BLOCK_V)
                dp_JH = _products(v_JV, do_HV, tl.zeros((BLOCK_J, BLOCK_H), tl.float32), BLOCK_H)
            else:
                dp_JH = _products(k_JD, do_HV, tl.zeros((BLOCK_J, BLOCK_H), tl.float32), BLOCK_H)
            ds_JH = p_JH * (dp_JH - delta_H[None, :]) * scale
            base = (local * GROUPS + group) * SLOTS * HEADS
            at_JH = slot_J[:, None] * HEADS + head_H[None, :]
            inside_JH = (slot_J < count)[:, None] & (head_H < HEADS)[None, :]
            tl.store(p_ptr + base + at_JH, p_JH.to(p_ptr.dtype.element_ty), mask=inside_JH)
            tl.store(ds_ptr + base + at_JH, ds_JH.to(ds_ptr.dtype.element_ty), mask=inside_JH)


@triton.jit(do_not_specialize=["start", "tokens", "keys"])
def _query_grad_kernel(
    ds_ptr,
    k_ptr,
    index_ptr,
    count_ptr,
    dq_ptr,
    start,
    tokens,
    keys,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(c) dq [T, H, WIDTH] = dS K, one block of columns a program; K is k or k_rope."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    first_column = program % COLUMN_BLOCKS * BLOCK_C
    first_head = program // COLUMN_BLOCKS % HEAD_BLOCKS * BLOCK_H
    group = program // (COLUMN_BLOCKS * HEAD_BLOCKS) % GROUPS
    local = (tokens - 1 - program // (COLUMN_BLOCKS * HEAD_BLOCKS * GROUPS)).to(tl.int64)
    token = start + local
    listed = token * LISTS + group % LISTS
    count = tl.load(count_ptr + listed)
    head_H = first_head + tl.arange(0, BLOCK_H)
    dq_HC = tl.zeros((BLOCK_H, BLOCK_C), tl.float32)
    for first in range(0, count, BLOCK_J):
        row_J, valid_J = _selected(index_ptr, listed, first, count, keys, group, GROUPS, SLOTS, FAR, BLOCK_J)
        ds_JH = _slots_by_head(
            ds_ptr, (local * GROUPS + group) * SLOTS, first, count, first_head, HEADS, BLOCK_J, BLOCK_H
        )
        k_JC = _gathered(k_ptr, row_J, valid_J, first_column, WIDTH, BLOCK_C)
        dq_HC = tl.dot(tl.trans(ds_JH), k_JC, dq_HC, input_precision="ieee")
    column_C = first_column + tl.arange(0, BLOCK_C)
    at_HC = head_H[:, None] * WIDTH + column_C[None, :]
    inside_HC = (head_H < HEADS)[:, None] & (column_C < WIDTH)[None, :]
    tl.store(
        dq_ptr + (token * GROUPS + group) * HEADS * WIDTH + at_HC, dq_HC.to(dq_ptr.dtype.element_ty), mask=inside_HC
    )


@triton.jit(do_not_specialize=["start", "keys"])
def _key_grad_kernel(
    first_ptr,
    first_rows_ptr,
    second_ptr,
    second_rows_ptr,
    index_ptr,
    count_ptr,
    out_ptr,
    start,
    keys,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    BOTH: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(d) a key's gradient by slot: dS^T q, P^T do, or both; to out [tokens, G, K, WIDTH], or added to [S, G, WIDTH].

    ``first`` and ``second`` [tokens, G, K, HEADS] are dS and P, their rows [T, H, WIDTH] q and do. A program holds a
    block of columns of a query's rows and walks the list.
    """
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    HELD: tl.constexpr = HEADS <= BLOCK_H
    program = tl.program_id(0)
    first_column = program % COLUMN_BLOCKS * BLOCK_C
    group = program // COLUMN_BLOCKS % GROUPS
    local = (program // (COLUMN_BLOCKS * GROUPS)).to(tl.int64)
    token = start + local
    listed = token * LISTS + group % LISTS
    count = tl.load(count_ptr + listed)
    rows = (local * GROUPS + group) * SLOTS
    heads = (token * GROUPS + group) * HEADS
    column_C = first_column + tl.arange(0, BLOCK_C)
    if HELD:
        x_HC = _head_rows(first_rows_ptr, heads, 0, first_column, HEADS, WIDTH, BLOCK_H, BLOCK_C)
        if BOTH:
            y_HC = _head_rows(second_rows_ptr, heads, 0, first_column, HEADS, WIDTH, BLOCK_H, BLOCK_C)
    for first in range(0, count, BLOCK_J):
        out_JC = tl.zeros((BLOCK_J, BLOCK_C), tl.float32)
        if HELD:
            a_JH = _slots_by_head(first_ptr, rows, first, count, 0, HEADS, BLOCK_J, BLOCK_H)
            out_JC = tl.dot(a_JH, x_HC, out_JC, input_precision="ieee")
            if BOTH:
                b_JH = _slots_by_head(second_ptr, rows, first, count, 0, HEADS, BLOCK_J, BLOCK_H)
                out_JC = tl.dot(b_JH, y_HC, out_JC, input_precision="ieee")
        else:
            for head in range(0, HEADS, BLOCK_H):
                a_JH = _slots_by_head(first_ptr, rows, first, count, head, HEADS, BLOCK_J, BLOCK_H)
                x_HC = _head_rows(first_rows_ptr, heads, head, first_column, HEADS, WIDTH, BLOCK_H, BLOCK_C)
                out_JC = tl.dot(a_JH, x_HC, out_JC, input_precision="ieee")
                if BOTH:
                    b_JH = _slots_by_head(second_ptr, rows, first, count, head, HEADS, BLOCK_J, BLOCK_H)
                    y_HC = _head_rows(second_rows_ptr, heads, head, first_column, HEADS, WIDTH, BLOCK_H, BLOCK_C)
                    out_JC = tl.dot(b_JH, y_HC, out_JC, input_precision="ieee")
        if ATOMIC:
            row_J, valid_J = _selected(index_ptr, listed, first, count, keys, group, GROUPS, SLOTS, FAR, BLOCK_J)
            at_JC = row_J[:, None] * WIDTH + column_C[None, :]
            tl.atomic_add(out_ptr + at_JC, out_JC, mask=valid_J[:, None] & (column_C < WIDTH)[None, :], sem="relaxed")
        else:
            slot_J = first + tl.arange(0, BLOCK_J)
            at_JC = slot_J[:, None] * WIDTH + column_C[None, :]
            inside_JC = (slot_J < count)[:, None] & (column_C < WIDTH)[None, :]
            tl.store(out_ptr + rows * WIDTH + at_JC, out_JC.to(out_ptr.dtype.element_ty), mask=inside_JC)


@triton.jit
def _sum_kernel(
    partial_ptr,
    place_ptr,
    end_ptr,
    out_ptr,
    GROUPS: tl.constexpr,
    LISTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(e) out [S, G, WIDTH] fp32 += the partial rows of each key's slots, in the order of the lists.

    ``place`` holds the slots [tokens, L, K] sorted by key and list; those of row s L + l end at ``end[s L + l + 1]``.
    """
    program = tl.program_id(0)
    key = (program // GROUPS).to(tl.int64)
    group = program % GROUPS
    entry = key * LISTS + group % LISTS
    begin = tl.load(end_ptr + entry)
    end = tl.load(end_ptr + entry + 1)
    if begin < end:
        column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        at_C = (key * GROUPS + group) * WIDTH + column_C
        sum_C = tl.load(out_ptr + at_C, mask=column_C < WIDTH, other=0.0)
        for first in range(begin, end, BLOCK_E):
            entry_E = first + tl.arange(0, BLOCK_E)
            place_E = tl.load(place_ptr + entry_E, mask=entry_E < end, other=0)
            token_E = place_E // (LISTS * SLOTS)
            row_E = (token_E * GROUPS + group).to(tl.int64) * SLOTS + place_E % SLOTS
            at_EC = row_E[:, None] * WIDTH + column_C[None, :]
            inside_EC = (entry_E < end)[:, None] & (column_C < WIDTH)[None, :]
            sum_C += tl.sum(tl.load(partial_ptr + at_EC, mask=inside_EC, other=0.0).to(tl.float32), axis=0)
        tl.store(out_ptr + at_C, sum_C, mask=column_C < WIDTH)


def traits(spec):
    """Backward reads the stored output for its delta."""
    return {"saved_outputs": ("o",)}


def bucket(tensors, spec):
    """Sizes by which a configuration is chosen: heads a key head, columns, width of a list; fp32 stands far apart."""
    q, k = tensors["q"], tensors["k"]
    if q.element_size() > 2:
        fp32 = 1 << 16
    else:
        fp32 = 1
    groups = max(k.shape[1], 1)
    return {"heads": q.shape[1] // groups, "columns": k.shape[2], "slots": tensors["index"].shape[-1], "fp32": fp32}


def _sizes(tensors, spec):
    """Constants of every kernel: groups, heads a group, lists a query, slots, columns.

    Raises:
        ValueError: the tensors do not fit together; says how.
    """
    q, k, index = tensors["q"], tensors["k"], tensors["index"]
    tokens, heads, width = q.shape
    groups = k.shape[1]
    if k.shape[2] != width or groups < 1 or heads % groups:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)}: columns must agree and heads be a multiple")
    if index.ndim == 2:
        lists = 1
    else:
        lists = index.shape[1]
    if index.shape[0] != tokens or lists not in (1, groups):
        raise ValueError(f"index {tuple(index.shape)} must be [{tokens}, K] or [{tokens}, {groups}, K]")
    rope, value = 0, width
    if spec.rope:
        rope = tensors["k_rope"].shape[2]
    if spec.separate:
        value = tensors["v"].shape[2]
    return {
        "GROUPS": groups,
        "HEADS": heads // groups,
        "LISTS": lists,
        "SLOTS": index.shape[-1],
        "FAR": k.shape[0] * groups * max(width, rope, value) >= 1 << 31,
        "D": width,
        "R": rope,
        "V": value,
    }


def _scale(sizes, spec):
    """The factor on the scores."""
    if spec.scale is None:
        return (sizes["D"] + sizes["R"]) ** -0.5
    else:
        return spec.scale


def _block(width, least=16):
    """The power of two that holds a width."""
    return max(triton.next_power_of_2(max(width, 1)), least)


def outputs_like(tensors, spec, config):
    """Empty o [T, H, V] (target like index, fp32); saved: lse [T, H] fp32 base 2, counts [T, L] int32, o."""
    q, index = tensors["q"], tensors["index"]
    tokens, heads, value = q.shape
    if spec.separate:
        value = tensors["v"].shape[2]
    outputs = {"o": q.new_empty((tokens, heads, value))}
    if spec.target:
        outputs["target"] = torch.zeros(index.shape, dtype=torch.float32, device=q.device)
    saved = {
        "o": outputs["o"],
        "lse": torch.empty((tokens, heads), dtype=torch.float32, device=q.device),
        "counts": torch.zeros(index.shape[:-1], dtype=torch.int32, device=q.device),
    }
    return outputs, saved


def forward(tensors, spec, config):
    """o (and target), and what backward needs.

    Raises:
        ValueError: the tensors do not fit together.
    """
    q, k, index = tensors["q"], tensors["k"], tensors["index"]
    sizes = _sizes(tensors, spec)
    outputs, saved = outputs_like(tensors, spec, config)
    tokens, keys, slots = q.shape[0], k.shape[0], sizes["SLOTS"]
    if outputs["o"].numel() == 0:
        return outputs, saved
    if slots > 0:
        block = min(_block(slots), config["count_slots"])
        _count_kernel[(saved["counts"].numel(),)](index, saved["counts"], keys, SLOTS=slots, BLOCK_J=block)
    if spec.rope:
        q_rope, k_rope = tensors["q_rope"], tensors["k_rope"]
    else:
        q_rope, k_rope = None, None
    heads = min(config["block_h"], _block(sizes["HEADS"]))
    if config["forward_split"] and slots > 0:
        _forward_in_two(tensors, outputs, saved, sizes, spec, config)
        if spec.target:
            outputs["target"] = _target(tensors, saved, sizes, spec, config)
        return outputs, saved
    _forward_kernel[(tokens * sizes["GROUPS"] * triton.cdiv(sizes["HEADS"], heads),)](
        q,
        q_rope,
        k,
        k_rope,
        tensors["v"] if spec.separate else None,
        index,
        saved["counts"],
        tensors["sink"] if spec.sink else None,
        outputs["o"],
        saved["lse"],
        tokens,
        keys,
        _scale(sizes, spec) * 1.4426950408889634,
        **sizes,
        ROPE=spec.rope,
        SEPARATE=spec.separate,
        SINK=spec.sink,
        BLOCK_H=heads,
        BLOCK_J=config["forward_slots"],
        BLOCK_D=_block(sizes["D"]),
        BLOCK_R=_block(sizes["R"]),
        BLOCK_V=_block(sizes["V"]),
        HALVES=not spec.separate and _block(sizes["D"]) > config["forward_columns"],
        num_warps=config["forward_warps"],
        num_stages=config["forward_stages"],
    )
    if spec.target and slots > 0:
        outputs["target"] = _target(tensors, saved, sizes, spec, config)
    return outputs, saved


def _forward_in_two(tensors, outputs, saved, sizes, spec, config):
    """Fill o and lse by way of the weights of all slots, over chunks of queries whose weights fit the workspace."""
    q, k, index = tensors["q"], tensors["k"], tensors["index"]
    heads = min(config["block_h"], _block(sizes["HEADS"]))
    blocks = triton.cdiv(sizes["HEADS"], heads)
    columns = min(config["query_columns"], _block(sizes["V"]))
    tile = config["weight_slots"]
    tokens, keys = q.shape[0], k.shape[0]
    each = sizes["SLOTS"] * sizes["GROUPS"] * sizes["HEADS"] * q.element_size()
    chunk = min(max(config["workspace_kib"] * 1024 // each, 1), tokens)
    place = (chunk, sizes["GROUPS"])
    p = q.new_empty((*place, sizes["SLOTS"], sizes["HEADS"]))
    shrink = q.new_empty((*place, triton.cdiv(sizes["SLOTS"], tile), sizes["HEADS"]), dtype=torch.float32)
    factor = q.new_empty((*place, sizes["HEADS"]), dtype=torch.float32)
    known = {n: sizes[n] for n in ("GROUPS", "HEADS", "LISTS", "SLOTS", "FAR", "V")}
    for start in range(0, tokens, chunk):
        part = min(chunk, tokens - start)
        _weights_kernel[(part * sizes["GROUPS"] * blocks,)](
            q,
            tensors["q_rope"] if spec.rope else None,
            k,
            tensors["k_rope"] if spec.rope else None,
            index,
            saved["counts"],
            tensors["sink"] if spec.sink else None,
            p,
            shrink,
            factor,
            saved["lse"],
            start,
            part,
            keys,
            _scale(sizes, spec) * 1.4426950408889634,
            **sizes,
            ROPE=spec.rope,
            SINK=spec.sink,
            BLOCK_H=heads,
            BLOCK_J=tile,
            BLOCK_D=_block(sizes["D"]),
            BLOCK_R=_block(sizes["R"]),
            num_warps=config["weight_warps"],
            num_stages=config["weight_stages"],
        )
        _values_kernel[(part * sizes["GROUPS"] * blocks * triton.cdiv(sizes["V"], columns),)](
            p,
            shrink,
            factor,
            tensors["v"] if spec.separate else k,
            index,
            saved["counts"],
            outputs["o"],
            start,
            part,
            keys,
            **known,
            BLOCK_H=heads,
            BLOCK_J=tile,
            BLOCK_C=columns,
            num_warps=config["query_warps"],
            num_stages=config["query_stages"],
        )


def _slot_pass(tensors, saved, do, delta, p, ds, target, start, tokens, sizes, spec, config):
    """Launch (b) over ``tokens`` queries from ``start`` on: P and dS, or (without do) the target alone."""
    heads = min(config["block_h"], _block(sizes["HEADS"]))
    scale = _scale(sizes, spec)
    _slot_kernel[(tokens * sizes["GROUPS"] * triton.cdiv(sizes["HEADS"], heads),)](
        tensors["q"],
        tensors["q_rope"] if spec.rope else None,
        tensors["k"],
        tensors["k_rope"] if spec.rope else None,
        tensors["v"] if spec.separate else None,
        tensors["index"],
        saved["counts"],
        saved["lse"],
        do,
        delta,
        p,
        ds,
        target,
        start,
        tokens,
        tensors["q"].shape[0],
        tensors["k"].shape[0],
        scale,
        scale * 1.4426950408889634,
        **sizes,
        ROPE=spec.rope,
        SEPARATE=spec.separate,
        TARGET=target is not None,
        GRADIENT=do is not None,
        BLOCK_H=heads,
        BLOCK_J=config["score_slots"],
        BLOCK_D=_block(sizes["D"]),
        BLOCK_R=_block(sizes["R"]),
        BLOCK_V=_block(sizes["V"]),
        num_warps=config["score_warps"],
        num_stages=config["score_stages"],
    )


def _target(tensors, saved, sizes, spec, config):
    """Probabilities of each slot, summed over the heads that share the list: fp32, of index's shape."""
    tokens, index = tensors["q"].shape[0], tensors["index"]
    heads = min(config["block_h"], _block(sizes["HEADS"]))
    parts = sizes["GROUPS"] // sizes["LISTS"] * triton.cdiv(sizes["HEADS"], heads)
    target = torch.zeros((parts, *index.shape), dtype=torch.float32, device=index.device)
    _slot_pass(tensors, saved, None, None, None, None, target, 0, tokens, sizes, spec, config)
    return target.sum(0)


def _sorted_slots(index, start, tokens, keys, sizes):
    """Places of a chunk's slots [tokens, L, K], sorted stably by key and list, and where each key's slots end."""
    lists = sizes["LISTS"]
    key = index[start : start + tokens].reshape(tokens, lists, sizes["SLOTS"])
    entry = key * lists + torch.arange(lists, device=index.device, dtype=index.dtype)[:, None]
    entry = torch.where((key >= 0) & (key < keys), entry, keys * lists)
    ordered, place = torch.sort(entry.reshape(-1), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(keys * lists + 1, device=index.device, dtype=index.dtype))
    return place.to(torch.int32), ends.to(torch.int32)


def _key_grads(rows, second_rows, p, ds, out, places, counts, index, start, tokens, sizes, spec, config):
    """Add a chunk's gradient to ``out`` [S, G, WIDTH] fp32: of dS^T rows, and of P^T second_rows if there are any."""
    width = out.shape[2]
    slots, columns = config["key_slots"], min(config["key_columns"], _block(width))
    groups, lists = sizes["GROUPS"], sizes["LISTS"]
    if spec.deterministic:
        partial = torch.empty((tokens, groups, sizes["SLOTS"], width), dtype=rows.dtype, device=rows.device)
    else:
        partial = out
    _key_grad_kernel[(tokens * groups * triton.cdiv(width, columns),)](
        ds,
        rows,
        p,
        second_rows,
        index,
        counts,
        partial,
        start,
        out.shape[0],
        GROUPS=groups,
        HEADS=sizes["HEADS"],
        LISTS=lists,
        SLOTS=sizes["SLOTS"],
        FAR=sizes["FAR"],
        WIDTH=width,
        BOTH=second_rows is not None,
        ATOMIC=not spec.deterministic,
        BLOCK_H=min(config["key_heads"], _block(sizes["HEADS"])),
        BLOCK_J=slots,
        BLOCK_C=columns,
        num_warps=config["key_warps"],
        num_stages=config["key_stages"],
    )
    if spec.deterministic:
        block = min(config["sum_columns"], _block(width))
        _sum_kernel[(out.shape[0] * groups, triton.cdiv(width, block))](
            partial,
            places[0],
            places[1],
            out,
            GROUPS=groups,
            LISTS=lists,
            SLOTS=sizes["SLOTS"],
            WIDTH=width,
            BLOCK_E=config["sum_entries"],
            BLOCK_C=block,
            num_warps=config["sum_warps"],
        )


def _query_grads(ds, k, index, counts, out, start, tokens, sizes, config):
    """A chunk's rows of out [T, H, WIDTH] = dS k."""
    width = out.shape[2]
    heads = min(config["block_h"], _block(sizes["HEADS"]))
    columns = min(config["query_columns"], _block(width))
    blocks = triton.cdiv(sizes["HEADS"], heads) * triton.cdiv(width, columns)
    _query_grad_kernel[(tokens * sizes["GROUPS"] * blocks,)](
        ds,
        k,
        index,
        counts,
        out,
        start,
        tokens,
        k.shape[0],
        GROUPS=sizes["GROUPS"],
        HEADS=sizes["HEADS"],
        LISTS=sizes["LISTS"],
        SLOTS=sizes["SLOTS"],
        FAR=sizes["FAR"],
        WIDTH=width,
        BLOCK_H=heads,
        BLOCK_J=config["query_slots"],
        BLOCK_C=columns,
        num_warps=config["query_warps"],
        num_stages=config["query_stages"],
    )


def _chunk(tensors, sizes, config):
    """Queries a chunk: P, dS and one partial gradient of them fit the configured workspace."""
    widest = max(sizes["D"], sizes["R"], sizes["V"])
    each = sizes["SLOTS"] * sizes["GROUPS"] * (2 * sizes["HEADS"] + widest) * tensors["q"].element_size()
    return min(max(config["workspace_kib"] * 1024 // each, 1), tensors["q"].shape[0])


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; those of keys and values gather in fp32 and are rounded once."""
    q, k, index = tensors["q"], tensors["k"], tensors["index"]
    counts, lse = saved["counts"], saved["lse"]
    do = grads["o"]
    sizes = _sizes(tensors, spec)
    if saved["o"].numel() == 0 or sizes["SLOTS"] == 0 or k.shape[0] == 0 or do is None:
        return {name: torch.zeros_like(tensors[name]) for name in needs}
    tokens, keys = q.shape[0], k.shape[0]
    rows = lse.numel()
    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(rows, config["delta_rows"]),)](
        do, saved["o"], delta, rows, V=sizes["V"], ROWS=config["delta_rows"], BLOCK_V=_block(sizes["V"])
    )
    found = {}
    if spec.sink and "sink" in needs:
        programs = min(triton.cdiv(tokens, config["delta_rows"]), SINK_PROGRAMS)
        partial = lse.new_empty((programs, lse.shape[1]))
        _sink_kernel[(programs, triton.cdiv(lse.shape[1], SINK_HEADS))](
            tensors["sink"],
            lse,
            delta,
            partial,
            tokens,
            HEADS=lse.shape[1],
            ROWS=config["delta_rows"],
            BLOCK_H=SINK_HEADS,
        )
        found["sink"] = partial.sum(0)
    # gradients of queries are whole after their chunk, those of keys after the last one
    if "q" in needs:
        found["q"] = torch.empty_like(q)
    if spec.rope and "q_rope" in needs:
        found["q_rope"] = torch.empty_like(tensors["q_rope"])
    if "k" in needs:
        found["k"] = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    if spec.rope and "k_rope" in needs:
        found["k_rope"] = torch.zeros(tensors["k_rope"].shape, dtype=torch.float32, device=k.device)
    if spec.separate and "v" in needs:
        found["v"] = torch.zeros(tensors["v"].shape, dtype=torch.float32, device=k.device)
    if len(found) == ("sink" in found):
        return found

    chunk = _chunk(tensors, sizes, config)
    shape = (chunk, sizes["GROUPS"], sizes["SLOTS"], sizes["HEADS"])
    p, ds = q.new_empty(shape), q.new_empty(shape)
    for start in range(0, tokens, chunk):
        part = min(chunk, tokens - start)
        _slot_pass(tensors, saved, do, delta, p, ds, None, start, part, sizes, spec, config)
        if "q" in found:
            _query_grads(ds, k, index, counts, found["q"], start, part, sizes, config)
        if spec.rope and "q_rope" in found:
            _query_grads(ds, tensors["k_rope"], index, counts, found["q_rope"], start, part, sizes, config)
        places = None
        if spec.deterministic and ("k" in found or "k_rope" in found or "v" in found):
            places = _sorted_slots(index, start, part, keys, sizes)
        if "k" in found:
            second = None if spec.separate else do
            _key_grads(q, second, p, ds, found["k"], places, counts, index, start, part, sizes, spec, config)
        if spec.rope and "k_rope" in found:
            rope = tensors["q_rope"]
            _key_grads(rope, None, p, ds, found["k_rope"], places, counts, index, start, part, sizes, spec, config)
        if spec.separate and "v" in found:
            _key_grads(do, None, None, p, found["v"], places, counts, index, start, part, sizes, spec, config)
    return found
