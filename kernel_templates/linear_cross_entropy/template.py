"""Linear layer and cross-entropy in one operator: logits of a block of rows and a chunk of the vocabulary at a time.

The product's kernel reduces its fp32 tile to a maximum, a sum of exponentials and the target's logit by row, so logits
are never stored; what is stored is at most one [block, chunk] buffer in the dtype of x. Three ways to the gradient,
chosen by the configuration and by what is asked for:

kept    The chunk is the whole vocabulary: exponentials are stored by the first product and scaled in place to dz.
online  Only x needs a gradient (frozen weight): dx accumulates e^(z - m) W with a running maximum m, as attention does.
twice   The statistics first, then every chunk's logits again, this time turned into dz in fp32.

With a scalar loss the gradient for an upstream gradient of 1 is made in forward, of the inputs in ``needs``, and scaled
in backward; by row it is made in backward. A row's gradient is dz = (A p + B [v = target] + S) cap'(z) scale.

Legend: N rows (of a block), V columns (of a chunk), D hidden; suffix _R one value a row, _C a column, _RC a tile.
"""

import torch
import triton
import triton.language as tl

# ---- tiles of a product ----------------------------------------------------------------------------------------


@triton.jit
def _tile_of(program, TILES_M, TILES_N, GROUP: tl.constexpr):
    """Row and column of a tile; GROUP rows of tiles run together, so that both operands stay in L2."""
    group = program // (GROUP * TILES_N)
    height = tl.minimum(TILES_M - group * GROUP, GROUP)
    inner = program - group * (GROUP * TILES_N)
    return group * GROUP + inner % height, inner // height


@triton.jit
def _product_tile(
    a_ptr, b_ptr, tile_m, tile_n, start, stop, M, N, A_M, A_K, B_K, B_N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    A_DEEP: tl.constexpr, B_DEEP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """sum over k in [start, stop) of A[m, k] B[k, n] in fp32 [BLOCK_M, BLOCK_N]; strides in elements.

    A_DEEP, B_DEEP: the operand is contiguous along k, else along the other dim. PADDED: A holds zeros where k goes on
    past the last, so its rows are loaded whole.
    """
    row_M, col_N, here_K = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first_m, first_n = tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N
    # what lies past the last row or column is not used: along a stride it is computed from the tile's first, along
    # contiguous elements it is masked, because loads stay whole that way
    if A_DEEP:
        row_M = tl.where(first_m + row_M < M, row_M, 0)
    if B_DEEP:
        col_N = tl.where(first_n + col_N < N, col_N, 0)
    exists_M, exists_N = first_m + row_M < M, first_n + col_N < N
    skipped = tl.cast(start, tl.int64)
    a_MK = a_ptr + first_m * A_M + skipped * A_K + (row_M[:, None] * A_M + here_K[None, :] * A_K)
    b_KN = b_ptr + first_n * B_N + skipped * B_K + (here_K[:, None] * B_K + col_N[None, :] * B_N)
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, stop, BLOCK_K):
        inside_K = k + here_K < stop
        if A_DEEP:
            if EVEN_K or PADDED:
                left = tl.load(a_MK)
            else:
                left = tl.load(a_MK, mask=inside_K[None, :], other=0.0)
        elif EVEN_K:
            left = tl.load(a_MK, mask=exists_M[:, None], other=0.0)
        else:
            left = tl.load(a_MK, mask=exists_M[:, None] & inside_K[None, :], other=0.0)
        if B_DEEP:
            if EVEN_K:
                right = tl.load(b_KN)
            else:
                right = tl.load(b_KN, mask=inside_K[:, None], other=0.0)
        elif EVEN_K:
            right = tl.load(b_KN, mask=exists_N[None, :], other=0.0)
        else:
            right = tl.load(b_KN, mask=exists_N[None, :] & inside_K[:, None], other=0.0)
        acc_MN = tl.dot(left, right, acc_MN, input_precision="ieee")
        a_MK += BLOCK_K * A_K
        b_KN += BLOCK_K * B_K
    return acc_MN


@triton.jit
def _logits_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr,
    max_ptr, sum_ptr, total_ptr, target_logit_ptr,
    lse_ptr, a_ptr, b_ptr, s_ptr, out_ptr,
    N, V, D, FIRST, STRIDE,
    BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    MODE: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of logits, reduced or turned into what the gradient needs.

    MODE ``statistics``: partial maximum, sum and total [tiles of columns, N], and the target's logit [N].
    MODE ``exponentials``: the same, and e^(z - tile's maximum) cap'(z) [N, V], zero at the target.
    MODE ``gradient``: dz [N, V] from lse and the coefficients A, B, S [N].
    """
    TILES_M, TILES_N = tl.cdiv(N, BLOCK_M), tl.cdiv(V, BLOCK_N)
    tile_m, tile_n = _tile_of(tl.program_id(0), TILES_M, TILES_N, GROUP)
    z_RC = _product_tile(
        x_ptr, weight_ptr, tile_m, tile_n, 0, D, N, V, D, 1, 1, D,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_D, True, True, False,
    )  # fmt: skip
    row_R = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col_C = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if BIAS:
        z_RC += tl.load(bias_ptr + col_C, mask=col_C < V, other=0.0).to(tl.float32)[None, :]
    if SCALE != 1.0:
        z_RC *= SCALE
    if CAP is not None:
        # tanh(u) = 2 sigmoid(2 u) - 1
        tanh_RC = 2.0 * tl.sigmoid((2.0 / CAP) * z_RC) - 1.0
        z_RC = CAP * tanh_RC
    target_R = tl.load(target_ptr + row_R, mask=row_R < N, other=-1) - FIRST
    if MODE != "statistics":
        out_base = out_ptr + tile_m.to(tl.int64) * BLOCK_M * STRIDE + tile_n * BLOCK_N
        out_at_RC = tl.arange(0, BLOCK_M)[:, None] * STRIDE + tl.arange(0, BLOCK_N)[None, :]
        # zeros after the last column, as far as the product that reads them goes on
        stored_inside_RC = (row_R < N)[:, None] & (col_C < STRIDE)[None, :]

    if MODE == "gradient":
        lse_R = tl.load(lse_ptr + row_R, mask=row_R < N, other=0.0)
        a_R = tl.load(a_ptr + row_R, mask=row_R < N, other=0.0)
        b_R = tl.load(b_ptr + row_R, mask=row_R < N, other=0.0)
        dz_RC = a_R[:, None] * tl.exp(z_RC - lse_R[:, None])
        dz_RC = tl.where(col_C[None, :] == target_R[:, None], dz_RC + b_R[:, None], dz_RC)
        live_R = (a_R != 0.0) | (b_R != 0.0)
        if SMOOTH:
            s_R = tl.load(s_ptr + row_R, mask=row_R < N, other=0.0)
            dz_RC += s_R[:, None]
            live_R = live_R | (s_R != 0.0)
        if CAP is not None:
            dz_RC *= 1.0 - tanh_RC * tanh_RC
        if SCALE != 1.0:
            dz_RC *= SCALE
        # a row that counts nothing may hold anything, NaN as well
        dz_RC = tl.where(live_R[:, None] & (col_C < V)[None, :], dz_RC, 0.0)
        stored_RC = dz_RC.to(out_ptr.dtype.element_ty)
        tl.store(out_base + out_at_RC, stored_RC, mask=stored_inside_RC)
    else:
        partial_at_R = tile_n.to(tl.int64) * N + row_R
        if SMOOTH:
            total_R = tl.sum(tl.where((col_C < V)[None, :], z_RC, 0.0), axis=1)
            tl.store(total_ptr + partial_at_R, total_R, mask=row_R < N)
        z_RC = tl.where((col_C < V)[None, :], z_RC, -float("inf"))
        hit_RC = col_C[None, :] == target_R[:, None]
        within_R = (target_R >= tile_n * BLOCK_N) & (target_R < tile_n * BLOCK_N + BLOCK_N) & (target_R < V)
        found_R = tl.sum(tl.where(hit_RC, z_RC, 0.0), axis=1)
        tl.store(target_logit_ptr + row_R, found_R, mask=(row_R < N) & within_R)
        max_R = tl.max(z_RC, axis=1)
        tl.store(max_ptr + partial_at_R, max_R, mask=row_R < N)
        e_RC = tl.exp(z_RC - tl.where(max_R == -float("inf"), 0.0, max_R)[:, None])
        tl.store(sum_ptr + partial_at_R, tl.sum(e_RC, axis=1), mask=row_R < N)
        if MODE == "exponentials":
            if CAP is not None:
                e_RC *= 1.0 - tanh_RC * tanh_RC
            # the target's column is added in fp32 where it is used: p - 1 of a confident row needs the digits
            stored_RC = tl.where(hit_RC | (col_C >= V)[None, :], 0.0, e_RC).to(out_ptr.dtype.element_ty)
            tl.store(out_base + out_at_RC, stored_RC, mask=stored_inside_RC)


@triton.jit
def _halves(tile_MN, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right columns of a tile; free in the layout of a wgmma accumulator."""
    return tl.split(tl.permute(tl.reshape(tile_MN, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _add_part(
    base, sum_MN, row_M, column, alpha_ptr, M, N,
    FIRST: tl.constexpr, ALPHA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add columns from ``column`` on to what out holds; ``base`` points at the tile's first row."""
    col_N = column + tl.arange(0, BLOCK_N)
    inside_MN = (row_M < M)[:, None] & (col_N < N)[None, :]
    at_MN = tl.arange(0, BLOCK_M)[:, None] * N + col_N[None, :]
    if not FIRST:
        old_MN = tl.load(base + at_MN, mask=inside_MN, other=0.0).to(tl.float32)
        if ALPHA:
            old_MN *= tl.load(alpha_ptr + row_M, mask=row_M < M, other=0.0)[:, None]
        sum_MN += old_MN
    tl.store(base + at_MN, sum_MN.to(base.dtype.element_ty), mask=inside_MN)


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, out_ptr, alpha_ptr, factor_ptr,
    M, N, K, SLICE, A_M, A_K,
    FIRST: tl.constexpr, ALPHA: tl.constexpr, FACTOR: tl.constexpr, EVEN_K: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[s] (+)= factor A B over the s-th SLICE of K; A [M, K] of any strides, B [K, N], out [slices, M, N].

    With ALPHA, what out holds is scaled by row before the sum. DEEP: A is contiguous along K and zero after it.
    """
    TILES_M, TILES_N = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = _tile_of(tl.program_id(0), TILES_M, TILES_N, GROUP)
    part = tl.program_id(1)
    start = part * SLICE
    stop = tl.minimum(start + SLICE, K)
    sum_MN = _product_tile(
        a_ptr,
        b_ptr,
        tile_m,
        tile_n,
        start,
        stop,
        M,
        N,
        A_M,
        A_K,
        N,
        1,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        DEEP,
        False,
        DEEP,
    )
    if FACTOR:
        sum_MN *= tl.load(factor_ptr)
    row_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    base = out_ptr + part.to(tl.int64) * M * N + tile_m.to(tl.int64) * BLOCK_M * N
    column = tile_n * BLOCK_N
    if BLOCK_N >= 128:
        # a quarter at a time: what out holds and its addresses would not fit beside a whole accumulator
        QUARTER: tl.constexpr = BLOCK_N // 4
        left_MN, right_MN = _halves(sum_MN, BLOCK_M, BLOCK_N)
        first_MN, second_MN = _halves(left_MN, BLOCK_M, BLOCK_N // 2)
        third_MN, fourth_MN = _halves(right_MN, BLOCK_M, BLOCK_N // 2)
        _add_part(base, first_MN, row_M, column, alpha_ptr, M, N, FIRST, ALPHA, BLOCK_M, QUARTER)
        _add_part(base, second_MN, row_M, column + QUARTER, alpha_ptr, M, N, FIRST, ALPHA, BLOCK_M, QUARTER)
        _add_part(base, third_MN, row_M, column + 2 * QUARTER, alpha_ptr, M, N, FIRST, ALPHA, BLOCK_M, QUARTER)
        _add_part(base, fourth_MN, row_M, column + 3 * QUARTER, alpha_ptr, M, N, FIRST, ALPHA, BLOCK_M, QUARTER)
    else:
        _add_part(base, sum_MN, row_M, column, alpha_ptr, M, N, FIRST, ALPHA, BLOCK_M, BLOCK_N)


# ---- rows ------------------------------------------------------------------------------------------------------


@triton.jit
def _denominator_kernel(target_ptr, denominator_ptr, factor_ptr, N, IGNORE: tl.constexpr, GIVEN: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """factor = 1 / denominator, or 1 / rows that count; 0 where that would be infinite."""
    if GIVEN:
        count = tl.load(denominator_ptr).to(tl.float32)
    else:
        count_R = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, N, BLOCK):
            row_R = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            target_R = tl.load(target_ptr + row_R, mask=row_R < N, other=IGNORE)
            count_R += (target_R != IGNORE).to(tl.int32)
        count = tl.sum(count_R, axis=0).to(tl.float32)
    tl.store(factor_ptr, tl.where(count == 0.0, 0.0, 1.0 / tl.where(count == 0.0, 1.0, count)))


@triton.jit
def _merge_kernel(
    part_max_ptr, part_sum_ptr, part_total_ptr, max_ptr, sum_ptr, total_ptr, alpha_ptr,
    N, TILES,
    FIRST: tl.constexpr, SMOOTH: tl.constexpr, ONLINE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk's partial maxima and sums [TILES, N] into the running ones [N]; alpha = e^(old maximum - new one)."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < N
    if FIRST:
        max_R = tl.full((ROWS,), -float("inf"), tl.float32)
        sum_R = tl.zeros((ROWS,), tl.float32)
        total_R = tl.zeros((ROWS,), tl.float32)
    else:
        max_R = tl.load(max_ptr + row_R, mask=inside_R, other=-float("inf"))
        sum_R = tl.load(sum_ptr + row_R, mask=inside_R, other=0.0)
        if SMOOTH:
            total_R = tl.load(total_ptr + row_R, mask=inside_R, other=0.0)
    before_R = max_R
    for start in range(0, TILES, BLOCK):
        tile_T = start + tl.arange(0, BLOCK)
        at_TR = tile_T.to(tl.int64)[:, None] * N + row_R[None, :]
        inside_TR = (tile_T < TILES)[:, None] & inside_R[None, :]
        part_TR = tl.load(part_max_ptr + at_TR, mask=inside_TR, other=-float("inf"))
        new_R = tl.maximum(max_R, tl.max(part_TR, axis=0))
        safe_R = tl.where(new_R == -float("inf"), 0.0, new_R)
        weight_TR = tl.exp(part_TR - safe_R[None, :])
        added_R = tl.sum(weight_TR * tl.load(part_sum_ptr + at_TR, mask=inside_TR, other=0.0), axis=0)
        sum_R = sum_R * tl.exp(max_R - safe_R) + added_R
        max_R = new_R
        if SMOOTH:
            total_R += tl.sum(tl.load(part_total_ptr + at_TR, mask=inside_TR, other=0.0), axis=0)
    tl.store(max_ptr + row_R, max_R, mask=inside_R)
    tl.store(sum_ptr + row_R, sum_R, mask=inside_R)
    if SMOOTH:
        tl.store(total_ptr + row_R, total_R, mask=inside_R)
    if ONLINE:
        safe_R = tl.where(max_R == -float("inf"), 0.0, max_R)
        tl.store(alpha_ptr + row_R, tl.exp(before_R - safe_R), mask=inside_R)


@triton.jit
def _finish_rows_kernel(
    max_ptr, sum_ptr, total_ptr, target_logit_ptr, target_ptr, upstream_ptr,
    lse_ptr, loss_ptr, a_ptr, b_ptr, s_ptr,
    N, V,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SMOOTH: tl.constexpr,
    STATISTICS: tl.constexpr, KNOWN_LSE: tl.constexpr, UPSTREAM: tl.constexpr, COEFFICIENTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """lse, the row's loss, and the coefficients A, B, S of its gradient, all [N] fp32."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < N
    if KNOWN_LSE:
        lse_R = tl.load(lse_ptr + row_R, mask=inside_R, other=0.0)
    else:
        sum_R = tl.load(sum_ptr + row_R, mask=inside_R, other=1.0)
        lse_R = tl.load(max_ptr + row_R, mask=inside_R, other=0.0) + tl.log(sum_R)
        tl.store(lse_ptr + row_R, lse_R, mask=inside_R)
    if not STATISTICS:
        target_R = tl.load(target_ptr + row_R, mask=inside_R, other=IGNORE)
        counts_R = target_R != IGNORE
        if not KNOWN_LSE:
            own_R = tl.load(target_logit_ptr + row_R, mask=inside_R, other=0.0)
            # an impossible target must not pass for a loss
            own_R = tl.where((target_R < 0) | (target_R >= V), float("nan"), own_R)
            loss_R = lse_R - (1.0 - SMOOTHING) * own_R
            if SMOOTH:
                loss_R -= SMOOTHING / V * tl.load(total_ptr + row_R, mask=inside_R, other=0.0)
            if Z_LOSS != 0.0:
                loss_R += Z_LOSS * lse_R * lse_R
            tl.store(loss_ptr + row_R, tl.where(counts_R, loss_R, 0.0), mask=inside_R)
        if COEFFICIENTS:
            unit_R = tl.where(counts_R, 1.0, 0.0)
            if UPSTREAM:
                unit_R *= tl.load(upstream_ptr + row_R, mask=inside_R, other=0.0)
            slope_R = unit_R
            if Z_LOSS != 0.0:
                slope_R = unit_R * (1.0 + 2.0 * Z_LOSS * lse_R)
            tl.store(a_ptr + row_R, slope_R, mask=inside_R)
            tl.store(b_ptr + row_R, -(1.0 - SMOOTHING) * unit_R, mask=inside_R)
            if SMOOTH:
                tl.store(s_ptr + row_R, -SMOOTHING / V * unit_R, mask=inside_R)


@triton.jit
def _loss_kernel(row_loss_ptr, factor_ptr, loss_ptr, N, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """factor times the sum of the rows' losses; one program, so that two runs are bitwise equal."""
    sum_R = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        row_R = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        sum_R += tl.load(row_loss_ptr + row_R, mask=row_R < N, other=0.0)
    loss = tl.sum(sum_R, axis=0)
    if FACTOR:
        loss *= tl.load(factor_ptr)
    tl.store(loss_ptr, loss)


# ---- gradients -------------------------------------------------------------------------------------------------


@triton.jit
def _scale_kernel(
    z_ptr, part_max_ptr, max_ptr, lse_ptr, target_logit_ptr, target_ptr, a_ptr, b_ptr, s_ptr,
    N, V, FIRST, STRIDE,
    ONLINE: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """In place: e^(z - tile's maximum) [N, V] to e^(z - running maximum) (ONLINE), or to dz."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    col_C = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_R = row_R < N
    inside_RC = inside_R[:, None] & (col_C < V)[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * STRIDE + col_C[None, :]
    value_RC = tl.load(z_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    part_R = tl.load(part_max_ptr + tile.to(tl.int64) * N + row_R, mask=inside_R, other=0.0)
    if ONLINE:
        max_R = tl.load(max_ptr + row_R, mask=inside_R, other=0.0)
        value_RC *= tl.exp(part_R - tl.where(max_R == -float("inf"), 0.0, max_R))[:, None]
    else:
        lse_R = tl.load(lse_ptr + row_R, mask=inside_R, other=0.0)
        a_R = tl.load(a_ptr + row_R, mask=inside_R, other=0.0)
        b_R = tl.load(b_ptr + row_R, mask=inside_R, other=0.0)
        value_RC *= (a_R * tl.exp(part_R - lse_R))[:, None]
        own_R = tl.load(target_logit_ptr + row_R, mask=inside_R, other=0.0)
        at_target_R = a_R * tl.exp(own_R - lse_R) + b_R
        if CAP is not None:
            at_target_R *= 1.0 - (own_R / CAP) * (own_R / CAP)
        target_R = tl.load(target_ptr + row_R, mask=inside_R, other=-1) - FIRST
        value_RC = tl.where(col_C[None, :] == target_R[:, None], at_target_R[:, None], value_RC)
        if SMOOTH:
            value_RC += tl.load(s_ptr + row_R, mask=inside_R, other=0.0)[:, None]
        if SCALE != 1.0:
            value_RC *= SCALE
        value_RC = tl.where(((a_R != 0.0) | (b_R != 0.0))[:, None], value_RC, 0.0)
    tl.store(z_ptr + at_RC, value_RC.to(z_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit
def _finish_kernel(
    acc_ptr, dx_ptr, factor_ptr, weight_ptr, target_ptr, target_logit_ptr, max_ptr, lse_ptr, a_ptr, b_ptr,
    N, V, D,
    SLICES: tl.constexpr, FACTOR: tl.constexpr, ONLINE: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx [N, D] from its partial sums [SLICES, N, D]; ONLINE: normalised, and the target's row of W added in fp32."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_R = row_R < N
    inside_RC = inside_R[:, None] & (col_C < D)[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * D + col_C[None, :]
    dx_RC = tl.load(acc_ptr + at_RC, mask=inside_RC, other=0.0)
    for part in tl.static_range(1, SLICES):
        dx_RC += tl.load(acc_ptr + tl.cast(N, tl.int64) * D * part + at_RC, mask=inside_RC, other=0.0)
    if ONLINE:
        lse_R = tl.load(lse_ptr + row_R, mask=inside_R, other=0.0)
        max_R = tl.load(max_ptr + row_R, mask=inside_R, other=0.0)
        a_R = tl.load(a_ptr + row_R, mask=inside_R, other=0.0)
        b_R = tl.load(b_ptr + row_R, mask=inside_R, other=0.0)
        own_R = tl.load(target_logit_ptr + row_R, mask=inside_R, other=0.0)
        at_target_R = a_R * tl.exp(own_R - lse_R) + b_R
        if CAP is not None:
            at_target_R *= 1.0 - (own_R / CAP) * (own_R / CAP)
        target_R = tl.load(target_ptr + row_R, mask=inside_R, other=-1)
        real_R = inside_R & (target_R >= 0) & (target_R < V)
        chosen_at_RC = tl.where(real_R, target_R, 0)[:, None] * D + col_C[None, :]
        chosen_RC = tl.load(weight_ptr + chosen_at_RC, mask=real_R[:, None] & (col_C < D)[None, :], other=0.0)
        dx_RC = dx_RC * (a_R * tl.exp(max_R - lse_R))[:, None] + at_target_R[:, None] * chosen_RC.to(tl.float32)
        if SCALE != 1.0:
            dx_RC *= SCALE
        dx_RC = tl.where(((a_R != 0.0) | (b_R != 0.0))[:, None], dx_RC, 0.0)
    if FACTOR:
        dx_RC *= tl.load(factor_ptr)
    tl.store(dx_ptr + at_RC, dx_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit
def _bias_kernel(dz_ptr, factor_ptr, dbias_ptr, N, V, STRIDE, FIRST: tl.constexpr, FACTOR: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """dbias [V] fp32 (+)= factor times the sum of dz [N, V] over its rows."""
    col_C = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_C = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, ROWS):
        row_R = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside_RC = (row_R < N)[:, None] & (col_C < V)[None, :]
        dz_RC = tl.load(dz_ptr + row_R[:, None] * STRIDE + col_C[None, :], mask=inside_RC, other=0.0)
        sum_C += tl.sum(dz_RC.to(tl.float32), axis=0)
    if FACTOR:
        sum_C *= tl.load(factor_ptr)
    if not FIRST:
        sum_C += tl.load(dbias_ptr + col_C, mask=col_C < V, other=0.0)
    tl.store(dbias_ptr + col_C, sum_C, mask=col_C < V)


@triton.jit
def _times_kernel(source_ptr, factor_ptr, out_ptr, COUNT, BLOCK: tl.constexpr):
    """out = factor x source over COUNT elements; they may be the same tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + at, mask=at < COUNT, other=0.0).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < COUNT)


# ---- host ------------------------------------------------------------------------------------------------------


def traits(spec):
    """Of a scalar loss, forward makes the gradients: backward reads no input, and hands what was saved out."""
    if spec.reduction == "mean":
        return {
            "forward_needs": True,
            "released": ("weight", "bias", "x"),
            "unread_inputs": ("x", "weight", "bias", "target", "denominator"),
        }
    if spec.reduction == "sum":
        return {
            "forward_needs": True,
            "released": ("weight", "bias", "x"),
            "unread_inputs": ("x", "weight", "bias", "target"),
        }
    return {}


def bucket(tensors, spec):
    """Configurations depend on the sizes and on whether products run in fp32."""
    x = tensors["x"]
    vocabulary, hidden = tensors["weight"].shape
    return {
        "rows": tensors["target"].numel(),
        "hidden": hidden,
        "vocabulary": vocabulary,
        "fp32": 65536 if x.dtype == torch.float32 else 1,
    }


def blocks(rows, config):
    """Blocks of rows, and rows a block."""
    size = max(1, min(rows, config["rows"]))
    return -(-rows // size), size


def chunk_size(vocabulary, config):
    """Columns of a chunk of the vocabulary."""
    return min(vocabulary, config["vocabulary"])


def gradients_like(tensors, needs, spec, config):
    """Empty gradients of the inputs in ``needs``: dx and dweight as they are summed up, dbias in fp32."""
    x, weight = tensors["x"], tensors["weight"]
    found = {}
    if "x" in needs:
        found["x"] = torch.empty_like(x)
    if not spec.frozen and "weight" in needs:
        # one block of rows is one sum, rounded once; several are added up
        once = blocks(tensors["target"].numel(), config)[0] <= 1
        kind = weight.dtype if once or config["accumulate"] == "storage" else torch.float32
        found["weight"] = torch.empty_like(weight, dtype=kind)
    if spec.bias and not spec.frozen and "bias" in needs:
        found["bias"] = torch.empty_like(tensors["bias"], dtype=torch.float32)
    return found


def everything(spec):
    """All inputs that may have a gradient."""
    return ("x",) if spec.frozen else ("x", "weight", "bias") if spec.bias else ("x", "weight")


def outputs_like(tensors, spec, config):
    """Empty outputs, fp32; saved: gradients for an upstream gradient of 1, or lse [...] fp32."""
    target = tensors["target"]
    x = tensors["x"]
    if spec.reduction == "mean" or spec.reduction == "sum":
        return {"loss": x.new_empty((), dtype=torch.float32)}, gradients_like(tensors, everything(spec), spec, config)
    lse = x.new_empty(target.shape, dtype=torch.float32)
    if spec.reduction == "none":
        return {"loss": torch.empty_like(lse)}, {"lse": lse}
    # the output stays the caller's own
    outputs = {"lse": torch.empty_like(lse), "target_logit": torch.empty_like(lse)}
    if spec.label_smoothing != 0.0:
        outputs["total"] = torch.empty_like(lse)
    return outputs, {"lse": lse}


def logits(x, weight, bias, target, partial, row, out, first, mode, spec, config):
    """Launch the product of x [N, D] and a chunk of the weight [V, D]; ``first`` is the chunk's first class."""
    count, hidden = x.shape
    width = weight.shape[0]
    tiles = -(-count // config["logits_m"]) * -(-width // config["logits_n"])
    _logits_kernel[(tiles,)](
        x, weight, bias, target,
        partial["max"], partial["sum"], partial["total"], row["target_logit"],
        row["lse"], row["a"], row["b"], row["s"], out,
        count, width, hidden, first, 0 if out is None else out.stride(0),
        BIAS=spec.bias,
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        SMOOTH=spec.label_smoothing != 0.0,
        MODE=mode,
        EVEN_D=hidden % config["logits_k"] == 0,
        BLOCK_M=config["logits_m"],
        BLOCK_N=config["logits_n"],
        BLOCK_K=config["logits_k"],
        GROUP=config["group"],
        num_warps=config["logits_warps"],
        num_stages=config["logits_stages"],
    )  # fmt: skip


def merge(partial, row, count, tiles, first, online, spec, config):
    """Launch the merging of a chunk's partial statistics into the running ones."""
    _merge_kernel[(-(-count // config["merge_rows"]),)](
        partial["max"], partial["sum"], partial["total"], row["max"], row["sum"], row["total"], row["alpha"],
        count, tiles,
        FIRST=first,
        SMOOTH=spec.label_smoothing != 0.0,
        ONLINE=online,
        ROWS=config["merge_rows"],
        BLOCK=config["merge_tiles"],
        num_warps=4,
    )  # fmt: skip


def finish_rows(row, target, upstream, vocabulary, known, coefficients, spec, config):
    """Launch what turns statistics into losses and coefficients."""
    count = target.shape[0]
    _finish_rows_kernel[(-(-count // 256),)](
        row["max"], row["sum"], row["total"], row["target_logit"], target, upstream,
        row["lse"], row["loss"], row["a"], row["b"], row["s"],
        count, vocabulary,
        IGNORE=spec.ignore_index,
        SMOOTHING=spec.label_smoothing,
        Z_LOSS=spec.z_loss,
        SMOOTH=spec.label_smoothing != 0.0,
        STATISTICS=spec.reduction == "statistics",
        KNOWN_LSE=known,
        UPSTREAM=upstream is not None,
        COEFFICIENTS=coefficients,
        ROWS=256,
        num_warps=4,
    )  # fmt: skip


def scale(chunk, partial, row, target, first, width, online, spec, config):
    """Launch what makes dz, or exponentials by the running maximum, of stored exponentials."""
    count = target.shape[0]
    _scale_kernel[(-(-count // config["scale_rows"]), -(-width // config["logits_n"]))](
        chunk, partial["max"], row["max"], row["lse"], row["target_logit"], target, row["a"], row["b"], row["s"],
        count, width, first, chunk.stride(0),
        ONLINE=online,
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        SMOOTH=spec.label_smoothing != 0.0,
        ROWS=config["scale_rows"],
        BLOCK_N=config["logits_n"],
        num_warps=4,
    )  # fmt: skip


def add_products(chunk, x, weight, partial_dx, gradients, alpha, factor, first, width, start, config):
    """Launch dx += dz W, dW += dz^T x and dbias += sum of dz for one chunk: ``first`` class on, row ``start`` on."""
    count, hidden = x.shape
    if partial_dx is not None:
        slices = partial_dx.shape[0]
        length = -(-width // (slices * config["dx_k"])) * config["dx_k"]
        tiles = -(-count // config["dx_m"]) * -(-hidden // config["dx_n"])
        _product_kernel[(tiles, slices)](
            chunk, weight, partial_dx, alpha, None,
            count, hidden, width, length, chunk.stride(0), 1,
            FIRST=first == 0,
            ALPHA=alpha is not None,
            FACTOR=False,
            EVEN_K=width % config["dx_k"] == 0,
            DEEP=True,
            BLOCK_M=config["dx_m"],
            BLOCK_N=config["dx_n"],
            BLOCK_K=config["dx_k"],
            GROUP=config["group"],
            num_warps=config["dx_warps"],
            num_stages=config["dx_stages"],
        )  # fmt: skip
    if "weight" in gradients:
        tiles = -(-width // config["dw_m"]) * -(-hidden // config["dw_n"])
        _product_kernel[(tiles, 1)](
            chunk, x, gradients["weight"].narrow(0, first, width), None, factor,
            width, hidden, count, count, 1, chunk.stride(0),
            FIRST=start == 0,
            ALPHA=False,
            FACTOR=factor is not None,
            EVEN_K=count % config["dw_k"] == 0,
            DEEP=False,
            BLOCK_M=config["dw_m"],
            BLOCK_N=config["dw_n"],
            BLOCK_K=config["dw_k"],
            GROUP=config["group"],
            num_warps=config["dw_warps"],
            num_stages=config["dw_stages"],
        )  # fmt: skip
    if "bias" in gradients:
        _bias_kernel[(-(-width // config["bias_n"]),)](
            chunk, factor, gradients["bias"].narrow(0, first, width),
            count, width, chunk.stride(0),
            FIRST=start == 0,
            FACTOR=factor is not None,
            ROWS=config["bias_rows"],
            BLOCK_N=config["bias_n"],
            num_warps=4,
        )  # fmt: skip


def finish_dx(partial_dx, dx, weight, target, row, factor, online, spec, config):
    """Launch what adds up the slices of dx and rounds."""
    count, hidden = dx.shape
    _finish_kernel[(-(-count // config["finish_rows"]), -(-hidden // config["finish_d"]))](
        partial_dx, dx, factor, weight, target, row["target_logit"], row["max"], row["lse"], row["a"], row["b"],
        count, weight.shape[0], hidden,
        SLICES=partial_dx.shape[0],
        FACTOR=factor is not None,
        ONLINE=online,
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        ROWS=config["finish_rows"],
        BLOCK_D=config["finish_d"],
        num_warps=4,
    )  # fmt: skip


def way(needs, vocabulary, spec, config):
    """How the gradients of ``needs`` are made: kept, online or twice; none for no gradient."""
    weights = not spec.frozen and ("weight" in needs or (spec.bias and "bias" in needs))
    if not weights and "x" not in needs:
        return "none"
    # dz with a smoothing term inside a cap cannot be made of exponentials alone
    if spec.label_smoothing != 0.0 and spec.softcap is not None:
        return "twice"
    if vocabulary <= config["vocabulary"]:
        return "kept"
    return "twice" if weights or spec.label_smoothing != 0.0 else "online"


def flattened(tensors):
    """x [N, D] and target [N]."""
    x, target = tensors["x"], tensors["target"]
    return x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)


def row_buffers(count, like, spec):
    """fp32 values by row of a block; the target's logit is 0 where no class is hit."""
    names = ("max", "sum", "lse", "loss", "alpha", "a", "b")
    row = {name: like.new_empty((count,), dtype=torch.float32) for name in names}
    row["target_logit"] = like.new_zeros((count,), dtype=torch.float32)
    row["total"] = row["s"] = None
    if spec.label_smoothing != 0.0:
        row["total"] = like.new_empty((count,), dtype=torch.float32)
        row["s"] = like.new_empty((count,), dtype=torch.float32)
    return row


def partial_buffers(count, width, like, spec, config):
    """Statistics of a chunk by tile of columns and row, fp32."""
    tiles = -(-width // config["logits_n"])
    partial = {name: like.new_empty((tiles, count), dtype=torch.float32) for name in ("max", "sum")}
    partial["total"] = None
    if spec.label_smoothing != 0.0:
        partial["total"] = like.new_empty((tiles, count), dtype=torch.float32)
    return partial


def chunk_buffer(count, width, x):
    """[count, width] in the dtype of x, with room for the zeros after a row's last column."""
    stride = -(-width // 128) * 128
    return x.new_empty((count, stride)).narrow(1, 0, width)


def dx_buffer(count, hidden, needs, x, config):
    """Partial sums of dx by slice of the vocabulary, fp32, or None where nobody asks."""
    return x.new_empty((config["dx_slices"], count, hidden), dtype=torch.float32) if "x" in needs else None


def gradient_pass(x, target, start, tensors, row, chunk, partial_dx, gradients, factor, spec, config):
    """Every chunk's logits again as dz, and the products with it, for a block of rows from ``start`` on."""
    weight = tensors["weight"]
    vocabulary = weight.shape[0]
    empty = {"max": None, "sum": None, "total": None}
    for first in range(0, vocabulary, chunk_size(vocabulary, config)):
        width = min(chunk_size(vocabulary, config), vocabulary - first)
        part = weight.narrow(0, first, width)
        bias = tensors["bias"].narrow(0, first, width) if spec.bias else None
        logits(x, part, bias, target, empty, row, chunk, first, "gradient", spec, config)
        add_products(chunk, x, part, partial_dx, gradients, None, factor, first, width, start, config)


def forward(tensors, spec, config, needs=None):
    """The outputs, and what backward needs; ``needs`` None means every gradient."""
    outputs, saved = outputs_like(tensors, spec, config)
    scalar = spec.reduction == "mean" or spec.reduction == "sum"
    wanted = () if not scalar else everything(spec) if needs is None else needs
    if scalar:
        saved = gradients_like(tensors, wanted, spec, config)
    rows_x, rows_target = flattened(tensors)
    weight = tensors["weight"]
    rows, hidden = rows_x.shape
    vocabulary = weight.shape[0]
    if rows == 0:
        return {n: t.zero_() for n, t in outputs.items()}, {n: t.zero_() for n, t in saved.items()}
    factor = None
    if spec.reduction == "mean":
        factor = rows_x.new_empty((1,), dtype=torch.float32)
        given = tensors.get("denominator")
        _denominator_kernel[(1,)](
            rows_target, given, factor, rows, IGNORE=spec.ignore_index, GIVEN=given is not None, BLOCK=1024, num_warps=4
        )
    how = way(wanted, vocabulary, spec, config)
    size = blocks(rows, config)[1]
    width = chunk_size(vocabulary, config)
    partial = partial_buffers(size, width, rows_x, spec, config)
    chunk = None if how == "none" else chunk_buffer(size, width, rows_x)
    partial_dx = dx_buffer(size, hidden, wanted, rows_x, config)
    row_loss = rows_x.new_empty((rows,), dtype=torch.float32)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        x, target = rows_x.narrow(0, start, count), rows_target.narrow(0, start, count)
        row = row_buffers(count, rows_x, spec)
        row["loss"] = row_loss.narrow(0, start, count)
        for first in range(0, vocabulary, width):
            columns = min(width, vocabulary - first)
            part = weight.narrow(0, first, columns)
            bias = tensors["bias"].narrow(0, first, columns) if spec.bias else None
            stored = how == "kept" or how == "online"
            mode = "exponentials" if stored else "statistics"
            logits(x, part, bias, target, partial, row, chunk if stored else None, first, mode, spec, config)
            merge(partial, row, count, -(-columns // config["logits_n"]), first == 0, how == "online", spec, config)
            if how == "online":
                scale(chunk, partial, row, target, first, columns, True, spec, config)
                add_products(chunk, x, part, partial_dx, {}, row["alpha"], None, first, columns, start, config)
        finish_rows(row, target, None, vocabulary, False, how != "none", spec, config)
        if how == "kept":
            scale(chunk, partial, row, target, 0, vocabulary, False, spec, config)
            add_products(chunk, x, weight, partial_dx, saved, None, factor, 0, vocabulary, start, config)
        if how == "twice":
            gradient_pass(x, target, start, tensors, row, chunk, partial_dx, saved, factor, spec, config)
        if "x" in wanted:
            dx = saved["x"].view(rows, hidden).narrow(0, start, count)
            finish_dx(partial_dx, dx, weight, target, row, factor, how == "online", spec, config)
        if not scalar:
            saved["lse"].view(-1).narrow(0, start, count).copy_(row["lse"])
        if spec.reduction == "statistics":
            outputs["lse"].view(-1).narrow(0, start, count).copy_(row["lse"])
            outputs["target_logit"].view(-1).narrow(0, start, count).copy_(row["target_logit"])
            if spec.label_smoothing != 0.0:
                outputs["total"].view(-1).narrow(0, start, count).copy_(row["total"])
    if spec.reduction == "none":
        outputs["loss"].view(-1).copy_(row_loss)
    if scalar:
        _loss_kernel[(1,)](row_loss, factor, outputs["loss"], rows, FACTOR=factor is not None, BLOCK=1024, num_warps=4)
    return outputs, saved


def scaled(saved, like, upstream):
    """saved x upstream in the dtype of ``like``: in place where that is its own dtype."""
    out = saved if saved.dtype == like.dtype else saved.new_empty(saved.shape, dtype=like.dtype)
    if saved.numel() > 0:
        _times_kernel[(-(-saved.numel() // 4096),)](saved, upstream, out, saved.numel(), BLOCK=4096, num_warps=8)
    return out


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs in ``needs``: scaled ones of forward, or made here from lse and the upstream by row."""
    if spec.reduction == "mean" or spec.reduction == "sum":
        return {name: scaled(saved[name], tensors[name], grads["loss"]) for name in needs}
    gradients = gradients_like(tensors, needs, spec, config)
    rows_x, rows_target = flattened(tensors)
    weight = tensors["weight"]
    rows, hidden = rows_x.shape
    vocabulary = weight.shape[0]
    if rows == 0:
        return {n: t.zero_() for n, t in gradients.items()}
    size = blocks(rows, config)[1]
    chunk = chunk_buffer(size, chunk_size(vocabulary, config), rows_x)
    partial_dx = dx_buffer(size, hidden, needs, rows_x, config)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        x, target = rows_x.narrow(0, start, count), rows_target.narrow(0, start, count)
        row = row_buffers(count, rows_x, spec)
        row["lse"] = saved["lse"].view(-1).narrow(0, start, count)
        if spec.reduction == "none":
            upstream = grads["loss"].view(-1).narrow(0, start, count)
            finish_rows(row, target, upstream, vocabulary, True, True, spec, config)
        else:
            # what flows into lse, the target's logit and the total are the coefficients themselves
            names = {"a": "lse", "b": "target_logit"}
            if spec.label_smoothing != 0.0:
                names["s"] = "total"
            for short, name in names.items():
                given = grads[name]
                row[short] = row["lse"].new_zeros((count,)) if given is None else given.view(-1).narrow(0, start, count)
        gradient_pass(x, target, start, tensors, row, chunk, partial_dx, gradients, None, spec, config)
        if "x" in needs:
            dx = gradients["x"].view(rows, hidden).narrow(0, start, count)
            finish_dx(partial_dx, dx, weight, target, row, None, False, spec, config)
    return {n: t.to(tensors[n].dtype) for n, t in gradients.items()}
