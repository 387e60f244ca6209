"""Linear layer and cross-entropy in one operator: logits of a block of rows and a slice of the vocabulary at a time.

The dense products are the library's (``torch.mm``, fp32 out); the kernels do what no library fuses: statistics of a
tile of logits in one pass, and the tile to dz in its own memory. How a gradient comes about, by the configuration and
by what is asked for:

slices  Statistics of all slices first, then dz slice by slice. Of the first ``kept`` classes the first pass leaves
        e^(z - m) in the dtype of x, which is dz but for a factor by row: products with W and with scaled rows of x make
        the gradients of it. Of the others logits are made again.
online  Only x needs a gradient (frozen weight): dx accumulates e^(z - m) W with a running m, as attention does.

m is the row's maximum, but for SLACK: it stays where it is until a logit exceeds it by more, so that what was stored
before seldom has to follow. With a scalar loss the gradient for an upstream gradient of 1 is made in forward, of the
inputs in ``needs``, and scaled in backward; by row it is made in backward. A row's gradient is
dz = (A p + B [v = target] + S) cap'(z) scale.

Legend: N rows (of a block), V columns (of a slice), D hidden; suffix _R one value a row, _C a column, _RC a tile.
"""

import torch
import triton
import triton.language as tl

SLACK = 32.0  # by how much a logit may exceed its row's reference; e^32 times any p has room in bf16 and fp32
NEVER_ZERO = 1e-20  # stands for a coefficient of exactly 0 by which another is divided

# ---- tiles of logits -------------------------------------------------------------------------------------------


@triton.jit
def _statistics_kernel(
    z_ptr, bias_ptr, target_ptr, max_ptr, sum_ptr, total_ptr, own_ptr, e_ptr, base_ptr, dx_ptr,
    N, V, D, FIRST, STRIDE, E_STRIDE,
    BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    START: tl.constexpr, STORE: tl.constexpr, RESCALE: tl.constexpr, ROOM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A slice's raw logits [N, V] fp32 into the running reference m, sum of e^(z - m), total and target's logit [N].

    START: the first slice. STORE: e^(z - m) cap'(z) as well, 0 at the target, and m in base [N]; e may lie in the
    memory of z. ROOM: m moves, to the maximum, where a logit exceeds it by more. RESCALE: rows of dx [N, D] follow.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.arange(0, BLOCK)
    inside_R, inside_C = row_R < N, col_C < V
    inside_RC = inside_R[:, None] & inside_C[None, :]
    long_R = row_R.to(tl.int64)
    z_RC = tl.load(z_ptr + long_R[:, None] * STRIDE + col_C[None, :], mask=inside_RC, other=0.0)
    if BIAS:
        z_RC += tl.load(bias_ptr + col_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    if SCALE != 1.0:
        z_RC *= SCALE
    if CAP is not None:
        # tanh(u) = 2 sigmoid(2 u) - 1
        tanh_RC = 2.0 * tl.sigmoid((2.0 / CAP) * z_RC) - 1.0
        z_RC = CAP * tanh_RC
    target_R = tl.load(target_ptr + row_R, mask=inside_R, other=-1) - FIRST
    hit_RC = (col_C[None, :] == target_R[:, None]) & inside_C[None, :]
    found_R = tl.sum(tl.where(hit_RC, z_RC, 0.0), axis=1)
    if START:
        before_R = tl.full((ROWS,), -float("inf"), tl.float32)
        sum_R = tl.zeros((ROWS,), tl.float32)
        tl.store(own_ptr + row_R, found_R, mask=inside_R)
    else:
        before_R = tl.load(max_ptr + row_R, mask=inside_R, other=-float("inf"))
        sum_R = tl.load(sum_ptr + row_R, mask=inside_R, other=0.0)
        tl.store(own_ptr + row_R, found_R, mask=inside_R & (target_R >= 0) & (target_R < V))
    if SMOOTH:
        total_R = tl.sum(tl.where(inside_C[None, :], z_RC, 0.0), axis=1)
        if not START:
            total_R += tl.load(total_ptr + row_R, mask=inside_R, other=0.0)
        tl.store(total_ptr + row_R, total_R, mask=inside_R)
    z_RC = tl.where(inside_C[None, :], z_RC, -float("inf"))
    max_R = tl.max(z_RC, axis=1)
    max_R = tl.where(max_R > before_R + ROOM, max_R, before_R)
    safe_R = tl.where(max_R == -float("inf"), 0.0, max_R)
    alpha_R = tl.exp(before_R - safe_R)
    e_RC = tl.exp(z_RC - safe_R[:, None])
    tl.store(max_ptr + row_R, max_R, mask=inside_R)
    tl.store(sum_ptr + row_R, sum_R * alpha_R + tl.sum(e_RC, axis=1), mask=inside_R)
    if STORE:
        if CAP is not None:
            e_RC *= 1.0 - tanh_RC * tanh_RC
        # the target's column is added in fp32 where it is used: p - 1 of a confident row needs the digits
        stored_RC = tl.where(hit_RC, 0.0, e_RC).to(e_ptr.dtype.element_ty)
        # every exponential depends on the row's maximum, so no thread stores over logits that another has to read
        tl.debug_barrier()
        tl.store(e_ptr + long_R[:, None] * E_STRIDE + col_C[None, :], stored_RC, mask=inside_RC)
        tl.store(base_ptr + row_R, safe_R, mask=inside_R)
    if RESCALE:
        if tl.min(alpha_R, axis=0) < 1.0:
            for start in range(0, D, BLOCK_D):
                d_D = start + tl.arange(0, BLOCK_D)
                at_RD = dx_ptr + long_R[:, None] * D + d_D[None, :]
                exists_RD = inside_R[:, None] & (d_D < D)[None, :]
                tl.store(at_RD, tl.load(at_RD, mask=exists_RD, other=0.0) * alpha_R[:, None], mask=exists_RD)


@triton.jit
def _dz_kernel(
    z_ptr, dz_ptr, bias_ptr, target_ptr, lse_ptr, a_ptr, b_ptr, s_ptr,
    N, V, FIRST, STRIDE, DZ_STRIDE,
    BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A slice's raw logits [N, V] fp32 to dz in the same memory."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.arange(0, BLOCK)
    inside_R, inside_C = row_R < N, col_C < V
    inside_RC = inside_R[:, None] & inside_C[None, :]
    long_R = row_R.to(tl.int64)
    value_RC = tl.load(z_ptr + long_R[:, None] * STRIDE + col_C[None, :], mask=inside_RC, other=0.0)
    # dz takes less room than logits: what a row's threads store may lie where others read
    tl.debug_barrier()
    target_R = tl.load(target_ptr + row_R, mask=inside_R, other=-1) - FIRST
    hit_RC = col_C[None, :] == target_R[:, None]
    lse_R = tl.load(lse_ptr + row_R, mask=inside_R, other=0.0)
    a_R = tl.load(a_ptr + row_R, mask=inside_R, other=0.0)
    b_R = tl.load(b_ptr + row_R, mask=inside_R, other=0.0)
    live_R = (a_R != 0.0) | (b_R != 0.0)
    if BIAS:
        value_RC += tl.load(bias_ptr + col_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    if SCALE != 1.0:
        value_RC *= SCALE
    if CAP is not None:
        tanh_RC = 2.0 * tl.sigmoid((2.0 / CAP) * value_RC) - 1.0
        value_RC = CAP * tanh_RC
    value_RC = a_R[:, None] * tl.exp(value_RC - lse_R[:, None])
    value_RC = tl.where(hit_RC, value_RC + b_R[:, None], value_RC)
    if SMOOTH:
        s_R = tl.load(s_ptr + row_R, mask=inside_R, other=0.0)
        value_RC += s_R[:, None]
        live_R = live_R | (s_R != 0.0)
    if CAP is not None:
        value_RC *= 1.0 - tanh_RC * tanh_RC
    if SCALE != 1.0:
        value_RC *= SCALE
    # a row that counts nothing may hold anything, NaN as well
    value_RC = tl.where(live_R[:, None], value_RC, 0.0)
    at_RC = dz_ptr + long_R[:, None] * DZ_STRIDE + col_C[None, :]
    tl.store(at_RC, value_RC.to(dz_ptr.dtype.element_ty), mask=inside_RC)


# ---- kept exponentials -----------------------------------------------------------------------------------------


@triton.jit
def _follow_kernel(e_ptr, base_ptr, max_ptr, K, WIDTH, STRIDE, BLOCK: tl.constexpr):
    """Exponentials [N, K] of every slice by their base [slices, N] to the last reference; one row and slice each."""
    row, part = tl.program_id(0), tl.program_id(1)
    base = tl.load(base_ptr + part.to(tl.int64) * tl.num_programs(0) + row)
    last = tl.load(max_ptr + row)
    if base < last:
        # a base of 0 stands for minus infinity: there is nothing but zeros
        factor = tl.exp(tl.minimum(base - last, 0.0))
        first = part * WIDTH
        row_ptr = e_ptr + row.to(tl.int64) * STRIDE
        for start in range(first, tl.minimum(first + WIDTH, K), BLOCK):
            col_C = start + tl.arange(0, BLOCK)
            inside_C = col_C < tl.minimum(first + WIDTH, K)
            value_C = tl.load(row_ptr + col_C, mask=inside_C, other=0.0).to(tl.float32) * factor
            tl.store(row_ptr + col_C, value_C.to(e_ptr.dtype.element_ty), mask=inside_C)


@triton.jit
def _row_scale_kernel(
    e_ptr, target_ptr, max_ptr, lse_ptr, own_ptr, a_ptr, b_ptr, scale_ptr, N, K, STRIDE,
    SCALE: tl.constexpr, CAP: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """scale [N] such that dz = scale e, and the target's e by which that is true of it as well."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < N
    max_R = tl.load(max_ptr + row_R, mask=inside_R, other=0.0)
    lse_R = tl.load(lse_ptr + row_R, mask=inside_R, other=0.0)
    own_R = tl.load(own_ptr + row_R, mask=inside_R, other=0.0)
    a_R = tl.load(a_ptr + row_R, mask=inside_R, other=0.0)
    b_R = tl.load(b_ptr + row_R, mask=inside_R, other=0.0)
    at_target_R = a_R * tl.exp(own_R - lse_R) + b_R
    if CAP is not None:
        at_target_R *= 1.0 - (own_R / CAP) * (own_R / CAP)
    a_R = tl.where((a_R == 0.0) & (b_R != 0.0), TINY, a_R)
    scale_R = a_R * tl.exp(max_R - lse_R)
    # a row that counts nothing may hold anything, NaN as well
    scale_R = tl.where(a_R == 0.0, 0.0, scale_R)
    at_target_R = tl.where(a_R == 0.0, 0.0, at_target_R / scale_R)
    target_R = tl.load(target_ptr + row_R, mask=inside_R, other=-1)
    at_R = e_ptr + row_R.to(tl.int64) * STRIDE + target_R
    tl.store(at_R, at_target_R.to(e_ptr.dtype.element_ty), mask=inside_R & (target_R >= 0) & (target_R < K))
    tl.store(scale_ptr + row_R, scale_R * SCALE, mask=inside_R)


@triton.jit
def _scale_rows_kernel(source_ptr, scale_ptr, out_ptr, N, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """out = scale [N] times source [N, D]; they may be the same tensor. A scale of 0 makes zeros of anything."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_RC = (row_R < N)[:, None] & (col_C < D)[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * D + col_C[None, :]
    scale_R = tl.load(scale_ptr + row_R, mask=row_R < N, other=0.0)
    value_RC = tl.load(source_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32) * scale_R[:, None]
    value_RC = tl.where((scale_R != 0.0)[:, None], value_RC, 0.0)
    tl.store(out_ptr + at_RC, value_RC.to(out_ptr.dtype.element_ty), mask=inside_RC)


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
def _finish_rows_kernel(
    max_ptr, sum_ptr, total_ptr, own_ptr, target_ptr, upstream_ptr, factor_ptr,
    lse_ptr, loss_ptr, a_ptr, b_ptr, s_ptr,
    N, V,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SMOOTH: tl.constexpr,
    STATISTICS: tl.constexpr, KNOWN_LSE: tl.constexpr, UPSTREAM: tl.constexpr, FACTOR: tl.constexpr,
    COEFFICIENTS: tl.constexpr, ROWS: tl.constexpr,
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
            own_R = tl.load(own_ptr + row_R, mask=inside_R, other=0.0)
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
            if FACTOR:
                unit_R *= tl.load(factor_ptr)
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
def _times_kernel(source_ptr, factor_ptr, out_ptr, COUNT, FACTOR: tl.constexpr, IN_PLACE: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """out = factor x source over COUNT elements; they may be the same tensor (IN_PLACE)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < COUNT
    if FACTOR:
        factor = tl.load(factor_ptr).to(tl.float32)
        if IN_PLACE:
            # a factor of 1 touches no memory
            here = at < tl.where(factor == 1.0, 0, COUNT)
    value = tl.load(source_ptr + at, mask=here, other=0.0).to(tl.float32)
    if FACTOR:
        value *= factor
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _finish_online_kernel(
    sum_ptr, dx_ptr, factor_ptr, weight_ptr, target_ptr, own_ptr, max_ptr, lse_ptr, a_ptr, b_ptr,
    N, V, D,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx [N, D] from the sum of e^(z - m) W: normalised, and the target's row of W added in fp32."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_R = row_R < N
    inside_RC = inside_R[:, None] & (col_C < D)[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * D + col_C[None, :]
    lse_R = tl.load(lse_ptr + row_R, mask=inside_R, other=0.0)
    max_R = tl.load(max_ptr + row_R, mask=inside_R, other=0.0)
    a_R = tl.load(a_ptr + row_R, mask=inside_R, other=0.0)
    b_R = tl.load(b_ptr + row_R, mask=inside_R, other=0.0)
    own_R = tl.load(own_ptr + row_R, mask=inside_R, other=0.0)
    at_target_R = a_R * tl.exp(own_R - lse_R) + b_R
    if CAP is not None:
        at_target_R *= 1.0 - (own_R / CAP) * (own_R / CAP)
    target_R = tl.load(target_ptr + row_R, mask=inside_R, other=-1)
    real_R = inside_R & (target_R >= 0) & (target_R < V)
    chosen_at_RC = tl.where(real_R, target_R, 0)[:, None] * D + col_C[None, :]
    chosen_RC = tl.load(weight_ptr + chosen_at_RC, mask=real_R[:, None] & (col_C < D)[None, :], other=0.0)
    dx_RC = tl.load(sum_ptr + at_RC, mask=inside_RC, other=0.0) * (a_R * tl.exp(max_R - lse_R))[:, None]
    dx_RC += at_target_R[:, None] * chosen_RC.to(tl.float32)
    if SCALE != 1.0:
        dx_RC *= SCALE
    if FACTOR:
        dx_RC *= tl.load(factor_ptr)
    dx_RC = tl.where(((a_R != 0.0) | (b_R != 0.0))[:, None], dx_RC, 0.0)
    tl.store(dx_ptr + at_RC, dx_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC)


# ---- host: products --------------------------------------------------------------------------------------------


def product(a, b, out, add):
    """out [M, N] (+)= a [M, K] b [K, N], whatever precision the process allows its own products.

    A result in fp32 sums in fp32; a half-precision one is rounded once (the library may round partial sums, too).
    fp32 operands, and all on a CPU, are multiplied in fp64: TF32 would be taken wherever somebody has allowed it.
    """
    if a.is_cuda and a.dtype != torch.float32:
        if out.dtype != torch.float32:
            if add:
                torch.addmm(out, a, b, out=out)
            else:
                torch.mm(a, b, out=out)
        elif add:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        exact = torch.mm(a.double(), b.double())
        if add:
            out.add_(exact)
        else:
            out.copy_(exact)


# ---- host: plan ------------------------------------------------------------------------------------------------


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


def everything(spec):
    """All inputs that may have a gradient."""
    return ("x",) if spec.frozen else ("x", "weight", "bias") if spec.bias else ("x", "weight")


def gradients_like(tensors, needs, spec):
    """Empty gradients of the inputs in ``needs`` that get one."""
    return {name: torch.empty_like(tensors[name]) for name in everything(spec) if name in needs}


def outputs_like(tensors, spec, config):
    """Empty outputs, fp32; saved: gradients for an upstream gradient of 1, or lse [...] fp32."""
    x = tensors["x"]
    if spec.reduction == "mean" or spec.reduction == "sum":
        return {"loss": x.new_empty((), dtype=torch.float32)}, gradients_like(tensors, everything(spec), spec)
    lse = x.new_empty(tensors["target"].shape, dtype=torch.float32)
    if spec.reduction == "none":
        return {"loss": torch.empty_like(lse)}, {"lse": lse}
    # the output stays the caller's own
    outputs = {"lse": torch.empty_like(lse), "target_logit": torch.empty_like(lse)}
    if spec.label_smoothing != 0.0:
        outputs["total"] = torch.empty_like(lse)
    return outputs, {"lse": lse}


def way(needs, spec):
    """How the gradients of ``needs`` are made: slices or online; none for no gradient."""
    if not spec.frozen and ("weight" in needs or (spec.bias and "bias" in needs)):
        return "slices"
    if "x" not in needs:
        return "none"
    return "online" if spec.label_smoothing == 0.0 else "slices"


def part_size(total, most):
    """Rows of a block, classes of a slice: as few parts of at most ``most`` as there can be, about equal."""
    count = -(-total // most)
    # whole tiles of a product
    return min(total, most, -(-total // (count * 128)) * 128)


def part_of(width, most):
    """Width of the parts of a slice that programs hold: whole parts make a slice."""
    return width // -(-width // most) if width % -(-width // most) == 0 else width


def kept_classes(vocabulary, needs, half, spec, config):
    """Classes whose exponentials are kept from the first pass: whole slices, or the whole vocabulary.

    None with smoothing or for a bias (dz of more than exponentials, sums of dz), nor in fp16 (``half``), where
    exponentials have no room and scaled rows of x no digits.
    """
    if way(needs, spec) != "slices" or spec.label_smoothing != 0.0 or half or (spec.bias and "bias" in needs):
        return 0
    width = part_size(vocabulary, config["classes"])
    return min(vocabulary, -(-config["kept"] // width) * width)


# ---- host: launches --------------------------------------------------------------------------------------------


def warps(block, config):
    """Warps of a program that holds ``tile_rows`` rows of ``block`` logits in registers."""
    return min(16, max(1, config["tile_rows"] * block // (32 * config["values"])))


def statistics(z, bias, target, row, base, e, dx_sum, first, half, spec, config):
    """Launch the reduction of raw logits z [N, V], whose first class is ``first``; e: where exponentials go, or None.

    dx_sum [N, D] is given where its rows follow the running reference. half: exponentials have fp16's range.
    """
    count, columns = z.shape
    block = triton.next_power_of_2(columns)
    _statistics_kernel[(-(-count // config["tile_rows"]),)](
        z, bias, target, row["max"], row["sum"], row["total"], row["own"], e, base, dx_sum,
        count, columns, 0 if dx_sum is None else dx_sum.shape[1], first, z.stride(0), 0 if e is None else e.stride(0),
        BIAS=spec.bias,
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        SMOOTH=spec.label_smoothing != 0.0,
        START=first == 0,
        STORE=e is not None,
        RESCALE=dx_sum is not None and first > 0,
        ROOM=0.0 if half else SLACK,
        ROWS=config["tile_rows"],
        BLOCK=block,
        BLOCK_D=config["finish_d"],
        num_warps=warps(block, config),
    )  # fmt: skip


def make_dz(z, dz, bias, target, row, first, spec, config):
    """Launch what turns raw logits [N, V] into dz in the same memory."""
    count, columns = dz.shape
    block = triton.next_power_of_2(columns)
    _dz_kernel[(-(-count // config["tile_rows"]),)](
        z, dz, bias, target, row["lse"], row["a"], row["b"], row["s"],
        count, columns, first, z.stride(0), dz.stride(0),
        BIAS=spec.bias,
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        SMOOTH=spec.label_smoothing != 0.0,
        ROWS=config["tile_rows"],
        BLOCK=block,
        num_warps=warps(block, config),
    )  # fmt: skip


def follow(held, bases, row, width):
    """Launch what brings kept exponentials [N, K], in parts of ``width``, from ``bases`` [parts, N] to the last m."""
    count, kept = held.shape
    _follow_kernel[(count, -(-kept // width))](
        held, bases, row["max"], kept, width, held.stride(0), BLOCK=1024, num_warps=4
    )


def row_scales(held, target, row, scale, spec):
    """Launch what makes ``scale`` [N], by which kept exponentials [N, K] are dz, and the target's exponentials."""
    count, kept = held.shape
    _row_scale_kernel[(-(-count // 256),)](
        held, target, row["max"], row["lse"], row["own"], row["a"], row["b"], scale, count, kept, held.stride(0),
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        TINY=NEVER_ZERO,
        ROWS=256,
        num_warps=4,
    )  # fmt: skip


def scale_rows(source, scale, out, config):
    """Launch out = scale [N] x source [N, D]."""
    count, hidden = source.shape
    _scale_rows_kernel[(-(-count // config["finish_rows"]), -(-hidden // config["finish_d"]))](
        source, scale, out, count, hidden, ROWS=config["finish_rows"], BLOCK_D=config["finish_d"], num_warps=4
    )


def finish_rows(row, target, upstream, factor, vocabulary, known, coefficients, spec):
    """Launch what turns statistics into losses and coefficients."""
    count = target.shape[0]
    _finish_rows_kernel[(-(-count // 256),)](
        row["max"], row["sum"], row["total"], row["own"], target, upstream, factor,
        row["lse"], row["loss"], row["a"], row["b"], row["s"],
        count, vocabulary,
        IGNORE=spec.ignore_index,
        SMOOTHING=spec.label_smoothing,
        Z_LOSS=spec.z_loss,
        SMOOTH=spec.label_smoothing != 0.0,
        STATISTICS=spec.reduction == "statistics",
        KNOWN_LSE=known,
        UPSTREAM=upstream is not None,
        FACTOR=factor is not None,
        COEFFICIENTS=coefficients,
        ROWS=256,
        num_warps=4,
    )  # fmt: skip


def finish_online(dx_sum, dx, weight, target, row, factor, spec, config):
    """Launch what makes dx of the sum of exponentials times W."""
    count, hidden = dx.shape
    _finish_online_kernel[(-(-count // config["finish_rows"]), -(-hidden // config["finish_d"]))](
        dx_sum, dx, factor, weight, target, row["own"], row["max"], row["lse"], row["a"], row["b"],
        count, weight.shape[0], hidden,
        FACTOR=factor is not None,
        SCALE=spec.logit_scale,
        CAP=spec.softcap,
        ROWS=config["finish_rows"],
        BLOCK_D=config["finish_d"],
        num_warps=4,
    )  # fmt: skip


def times(source, factor, out, in_place):
    """Launch out = factor x source, or a plain conversion; both contiguous."""
    count = source.numel()
    if count > 0:
        _times_kernel[(-(-count // 4096),)](
            source, factor, out, count, FACTOR=factor is not None, IN_PLACE=in_place, BLOCK=4096, num_warps=8
        )


# ---- host: passes ----------------------------------------------------------------------------------------------


def flattened(tensors):
    """x [N, D] and target [N]."""
    x, target = tensors["x"], tensors["target"]
    return x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)


def row_buffers(count, like, spec):
    """fp32 values by row of a block."""
    row = {
        name: like.new_empty((count,), dtype=torch.float32) for name in ("max", "sum", "own", "lse", "loss", "a", "b")
    }
    row["total"] = row["s"] = None
    if spec.label_smoothing != 0.0:
        row["total"] = like.new_empty((count,), dtype=torch.float32)
        row["s"] = like.new_empty((count,), dtype=torch.float32)
    return row


def wide_buffer(count, width, like, dtype):
    """[count, width] whose rows start at whole cache lines, as fast products want it."""
    return like.new_empty((count, -(-width // 64) * 64), dtype=dtype).narrow(1, 0, width)


def corner(buffer, rows, columns):
    """The first rows and columns of a buffer."""
    return buffer.narrow(0, 0, rows).narrow(1, 0, columns)


def inside(z, dtype):
    """A tensor of another dtype, no wider, in the memory of z: row n at the start of z's row n."""
    return z.view(dtype).narrow(1, 0, z.shape[1])


def weight_sums(weight, blocks, width, gradients, config):
    """fp32 [slice or vocabulary, D] in which dW is summed before it is rounded; None: in the gradient itself."""
    if "weight" not in gradients or weight.dtype == torch.float32 or config["accumulate"] == "storage":
        return None
    rows = weight.shape[0] if blocks > 1 else width
    return weight.new_empty((rows, weight.shape[1]), dtype=torch.float32)


def bias_sums(gradients, vocabulary, like):
    """fp32 zeros [V] in which dbias is summed, or None."""
    return like.new_zeros((vocabulary,), dtype=torch.float32) if "bias" in gradients else None


def slices(tensors, tile, held, bases, online, count, width, part_width, kept, spec):
    """By slice what is the same for every block of ``count`` rows.

    First class, rows of W and their transpose, biases, logits; and parts of the slice, as wide as a program's tile:
    first class, logits, biases, exponentials and where their reference goes, or None.
    """
    weight = tensors["weight"]
    vocabulary = weight.shape[0]
    found = []
    for first in range(0, vocabulary, width):
        columns = min(width, vocabulary - first)
        rows = weight.narrow(0, first, columns)
        bias = tensors["bias"].narrow(0, first, columns) if spec.bias else None
        z = corner(tile, count, columns)
        parts = []
        for start in range(0, columns, part_width):
            size = min(part_width, columns - start)
            e, base = None, None
            if online:
                e, base = inside(z, weight.dtype), bases[0]
            elif first < kept:
                e, base = held.narrow(1, first + start, size), bases[(first + start) // part_width]
            some = None if bias is None else bias.narrow(0, start, size)
            parts.append((first + start, z.narrow(1, start, size), some, e, base))
        found.append((first, rows, rows.t(), bias, z, parts))
    return found


def statistics_pass(x, target, views, row, dx_sum, spec, config):
    """Every slice's logits once: statistics, kept exponentials, and (dx_sum) the sum of exponentials times W."""
    half = x.dtype == torch.float16
    for first, weight, transposed, _, z, parts in views:
        product(x, transposed, z, False)
        for start, some, bias, e, base in parts:
            statistics(some, bias, target, row, base, e, dx_sum, start, half, spec, config)
        if dx_sum is not None:
            product(parts[0][3], weight, dx_sum, first > 0)


def kept_pass(
    x, target, start, last, tensors, row, bases, held, dx_sum, dw_sum, gradients, width, part_width, spec, config
):
    """The products of a block of rows from ``start`` on with the dz of kept classes; ``last``: no block follows."""
    weight = tensors["weight"]
    kept = held.shape[1]
    follow(held, bases, row, part_width)
    scale = torch.empty_like(row["a"])
    row_scales(held, target, row, scale, spec)
    if "weight" in gradients:
        scaled = torch.empty_like(x)
        scale_rows(x, scale, scaled, config)
        whole = dw_sum is None or dw_sum.shape[0] == weight.shape[0]
        step = kept if whole else width
        for first in range(0, kept, step):
            columns = min(step, kept - first)
            own = gradients["weight"].narrow(0, first, columns)
            into = own
            if dw_sum is not None:
                into = dw_sum.narrow(0, first if whole else 0, columns)
            product(held.narrow(1, first, columns).t(), scaled, into, start > 0)
            if last and dw_sum is not None:
                times(into, None, own, False)
    if dx_sum is not None:
        product(held, weight.narrow(0, 0, kept), dx_sum, False)
        scale_rows(dx_sum, scale, dx_sum, config)


def gradient_pass(
    x, target, start, last, views, row, dx_sum, dw_sum, db_sum, gradients, factor, vocabulary, kept, spec, config
):
    """The dz of what is not kept, of rows from ``start`` on, and its products; ``last``: no block follows."""
    for first, part, transposed, bias, z, _ in views:
        if first < kept:
            continue
        columns = part.shape[0]
        product(x, transposed, z, False)
        dz = inside(z, x.dtype)
        make_dz(z, dz, bias, target, row, first, spec, config)
        if "weight" in gradients:
            own = gradients["weight"].narrow(0, first, columns)
            into = own
            if dw_sum is not None:
                into = dw_sum.narrow(0, first if dw_sum.shape[0] == vocabulary else 0, columns)
            product(dz.t(), x, into, start > 0)
            if last and (dw_sum is not None or factor is not None):
                times(into, factor, own, dw_sum is None)
        if db_sum is not None:
            db_sum.narrow(0, first, columns).add_(dz.sum(0, dtype=torch.float32))
        if dx_sum is not None:
            product(dz, part, dx_sum, first > 0)


def forward(tensors, spec, config, needs=None):
    """The outputs, and what backward needs; ``needs`` None means every gradient."""
    scalar = spec.reduction == "mean" or spec.reduction == "sum"
    wanted = () if not scalar else everything(spec) if needs is None else needs
    if scalar:
        # not outputs_like: it makes every gradient, and dW twice at once is a gigabyte
        outputs = {"loss": tensors["x"].new_empty((), dtype=torch.float32)}
        saved = gradients_like(tensors, wanted, spec)
    else:
        outputs, saved = outputs_like(tensors, spec, config)
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
    # in fp16 the mean's small coefficients would have no digits: the gradients are scaled at the end
    half = rows_x.dtype == torch.float16
    late, early = (factor, None) if half else (None, factor)
    how = way(wanted, spec)
    online = how == "online"
    size = part_size(rows, config["online_rows"] if online else config["rows"])
    width = part_size(vocabulary, config["online_classes"] if online else config["classes"])
    kept = kept_classes(vocabulary, wanted, half, spec, config)
    part_width = width if online else part_of(width, config["tile_classes"])
    tile = wide_buffer(size, width, rows_x, torch.float32)
    held = wide_buffer(size, kept, rows_x, rows_x.dtype) if kept > 0 else None
    bases = rows_x.new_empty((max(1, -(-kept // part_width)) * size,), dtype=torch.float32)
    dx_block = rows_x.new_empty((size, hidden), dtype=torch.float32) if "x" in wanted else None
    dw_sum = weight_sums(weight, -(-rows // size), width, saved, config)
    db_sum = bias_sums(saved, vocabulary, rows_x)
    row = row_buffers(size, rows_x, spec)
    row_loss = rows_x.new_empty((rows,), dtype=torch.float32)
    views = None
    for start in range(0, rows, size):
        count = min(size, rows - start)
        x, target = rows_x.narrow(0, start, count), rows_target.narrow(0, start, count)
        row["loss"] = row_loss.narrow(0, start, count)
        dx_sum = None if dx_block is None else dx_block.narrow(0, 0, count)
        if views is None or count < size:
            # a short last block's rows come first in every buffer
            by_part = bases.narrow(0, 0, bases.shape[0] // size * count).view(-1, count)
            kept_e = None if held is None else corner(held, count, kept)
            views = slices(tensors, tile, kept_e, by_part, online, count, width, part_width, kept, spec)
        statistics_pass(x, target, views, row, dx_sum if online else None, spec, config)
        finish_rows(row, target, None, early, vocabulary, False, how != "none", spec)
        if how == "slices":
            last = start + count == rows
            if kept > 0:
                kept_pass(
                    x, target, start, last, tensors, row, by_part, kept_e, dx_sum, dw_sum, saved, width, part_width,
                    spec, config,
                )  # fmt: skip
            gradient_pass(
                x, target, start, last, views, row, dx_sum, dw_sum, db_sum, saved, late, vocabulary, kept, spec, config
            )
        if dx_sum is not None:
            dx = saved["x"].view(rows, hidden).narrow(0, start, count)
            if online:
                finish_online(dx_sum, dx, weight, target, row, late, spec, config)
            else:
                times(dx_sum, late, dx, False)
        if not scalar:
            saved["lse"].view(-1).narrow(0, start, count).copy_(row["lse"].narrow(0, 0, count))
        if spec.reduction == "statistics":
            outputs["lse"].view(-1).narrow(0, start, count).copy_(row["lse"].narrow(0, 0, count))
            outputs["target_logit"].view(-1).narrow(0, start, count).copy_(row["own"].narrow(0, 0, count))
            if spec.label_smoothing != 0.0:
                outputs["total"].view(-1).narrow(0, start, count).copy_(row["total"].narrow(0, 0, count))
    if db_sum is not None:
        times(db_sum, late, saved["bias"], False)
    if spec.reduction == "none":
        outputs["loss"].view(-1).copy_(row_loss)
    if scalar:
        _loss_kernel[(1,)](row_loss, factor, outputs["loss"], rows, FACTOR=factor is not None, BLOCK=1024, num_warps=4)
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs in ``needs``: scaled ones of forward, or made here from lse and the upstream by row."""
    if spec.reduction == "mean" or spec.reduction == "sum":
        for name in needs:
            times(saved[name], grads["loss"], saved[name], True)
        return {name: saved[name] for name in needs}
    gradients = gradients_like(tensors, needs, spec)
    rows_x, rows_target = flattened(tensors)
    weight = tensors["weight"]
    rows, hidden = rows_x.shape
    vocabulary = weight.shape[0]
    if rows == 0:
        return {n: t.zero_() for n, t in gradients.items()}
    size = part_size(rows, config["rows"])
    width = part_size(vocabulary, config["classes"])
    tile = wide_buffer(size, width, rows_x, torch.float32)
    dx_block = rows_x.new_empty((size, hidden), dtype=torch.float32) if "x" in needs else None
    dw_sum = weight_sums(weight, -(-rows // size), width, gradients, config)
    db_sum = bias_sums(gradients, vocabulary, rows_x)
    views = None
    for start in range(0, rows, size):
        count = min(size, rows - start)
        if views is None or count < size:
            views = slices(tensors, tile, None, None, False, count, width, width, 0, spec)
        x, target = rows_x.narrow(0, start, count), rows_target.narrow(0, start, count)
        row = row_buffers(count, rows_x, spec)
        row["lse"] = saved["lse"].view(-1).narrow(0, start, count)
        if spec.reduction == "none":
            upstream = grads["loss"].view(-1).narrow(0, start, count)
            finish_rows(row, target, upstream, None, vocabulary, True, True, spec)
        else:
            # what flows into lse, the target's logit and the total are the coefficients themselves
            names = {"a": "lse", "b": "target_logit"}
            if spec.label_smoothing != 0.0:
                names["s"] = "total"
            for short, name in names.items():
                given = grads[name]
                row[short] = row["lse"].new_zeros((count,)) if given is None else given.view(-1).narrow(0, start, count)
        dx_sum = None if dx_block is None else dx_block.narrow(0, 0, count)
        last = start + count == rows
        gradient_pass(
            x, target, start, last, views, row, dx_sum, dw_sum, db_sum, gradients, None, vocabulary, 0, spec, config
        )
        if dx_sum is not None:
            times(dx_sum, None, gradients["x"].view(rows, hidden).narrow(0, start, count), False)
    if db_sum is not None:
        times(db_sum, None, gradients["bias"], False)
    return gradients
