"""Rotary position embedding of queries and keys in one launch, forward and backward, after a head norm if there is one.

Heads are rows [N tokens, H, D]. A program handles a tile of tokens and a few heads: it loads cos and sin once and turns
every head with them. A head is read in three parts, the first and the second channels of its pairs and the channels
that pass, each once; all arithmetic is fp32. With a norm, backward recomputes the RMS from the head and keeps the
weight's gradient in registers: one partial sum a program, added up afterwards, so two runs are bitwise equal.

Legend: N tokens, H heads, D channels of a head, R of them turned; suffix _TP is a tile [TOKENS, pairs], _TC one of
channels that pass, _T one value a token, _P and _C one a pair or channel.
"""

import torch
import triton
import triton.language as tl

# ---- parts of a head -------------------------------------------------------------------------------------------


@triton.jit
def _angles(
    table_ptr, token_T, pair_P, N, ROWS, R, WIDTH,
    INTERLEAVED: tl.constexpr, BY_PAIR: tl.constexpr, TEMPORAL: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """cos (or sin) of the first and of the second channel of each pair, fp32."""
    half = R // 2
    inside_TP = (token_T < N)[:, None] & (pair_P < half)[None, :]
    # one table may serve every sequence of a batch
    row_T = token_T % ROWS
    at_TP = row_T[:, None] * WIDTH
    if TEMPORAL != 0:
        axis_P = (pair_P >= TEMPORAL).to(tl.int32) + (pair_P >= TEMPORAL + HEIGHT).to(tl.int32)
        at_TP = at_TP + axis_P.to(tl.int64)[None, :] * ROWS * WIDTH
    if BY_PAIR:
        first_TP = tl.load(table_ptr + at_TP + pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        second_TP = first_TP
    elif INTERLEAVED:
        first_TP = tl.load(table_ptr + at_TP + 2 * pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        second_TP = tl.load(table_ptr + at_TP + 2 * pair_P[None, :] + 1, mask=inside_TP, other=0.0).to(tl.float32)
    else:
        first_TP = tl.load(table_ptr + at_TP + pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        second_TP = tl.load(table_ptr + at_TP + half + pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
    return first_TP, second_TP


@triton.jit
def _load_pairs(base, token_T, pair_P, N, ROW, R, INTERLEAVED: tl.constexpr):
    """First and second channels of the pairs of one head, fp32; ``base`` points at the head of token 0."""
    half = R // 2
    inside_TP = (token_T < N)[:, None] & (pair_P < half)[None, :]
    at_TP = token_T[:, None] * ROW
    if INTERLEAVED:
        a_TP = tl.load(base + at_TP + 2 * pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        b_TP = tl.load(base + at_TP + 2 * pair_P[None, :] + 1, mask=inside_TP, other=0.0).to(tl.float32)
    else:
        a_TP = tl.load(base + at_TP + pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        b_TP = tl.load(base + at_TP + half + pair_P[None, :], mask=inside_TP, other=0.0).to(tl.float32)
    return a_TP, b_TP


@triton.jit
def _store_pairs(base, a_TP, b_TP, token_T, pair_P, N, ROW, R, INTERLEAVED: tl.constexpr):
    """The inverse of :func:`_load_pairs`."""
    half = R // 2
    inside_TP = (token_T < N)[:, None] & (pair_P < half)[None, :]
    at_TP = token_T[:, None] * ROW
    kind: tl.constexpr = base.dtype.element_ty
    if INTERLEAVED:
        tl.store(base + at_TP + 2 * pair_P[None, :], a_TP.to(kind), mask=inside_TP)
        tl.store(base + at_TP + 2 * pair_P[None, :] + 1, b_TP.to(kind), mask=inside_TP)
    else:
        tl.store(base + at_TP + pair_P[None, :], a_TP.to(kind), mask=inside_TP)
        tl.store(base + at_TP + half + pair_P[None, :], b_TP.to(kind), mask=inside_TP)


@triton.jit
def _load_rest(base, token_T, rest_C, N, ROW, R, D):
    """Channels that pass, fp32."""
    inside_TC = (token_T < N)[:, None] & (rest_C < D - R)[None, :]
    return tl.load(base + token_T[:, None] * ROW + R + rest_C[None, :], mask=inside_TC, other=0.0).to(tl.float32)


@triton.jit
def _store_rest(base, rest_TC, token_T, rest_C, N, ROW, R, D):
    """The inverse of :func:`_load_rest`."""
    inside_TC = (token_T < N)[:, None] & (rest_C < D - R)[None, :]
    tl.store(base + token_T[:, None] * ROW + R + rest_C[None, :], rest_TC.to(base.dtype.element_ty), mask=inside_TC)


@triton.jit
def _scales(weight_ptr, pair_P, rest_C, R, D, INTERLEAVED: tl.constexpr, OFFSET: tl.constexpr):
    """The norm's scale of the three parts of a head, fp32."""
    half = R // 2
    if INTERLEAVED:
        a_P = tl.load(weight_ptr + 2 * pair_P, mask=pair_P < half, other=0.0).to(tl.float32)
        b_P = tl.load(weight_ptr + 2 * pair_P + 1, mask=pair_P < half, other=0.0).to(tl.float32)
    else:
        a_P = tl.load(weight_ptr + pair_P, mask=pair_P < half, other=0.0).to(tl.float32)
        b_P = tl.load(weight_ptr + half + pair_P, mask=pair_P < half, other=0.0).to(tl.float32)
    rest_scale_C = tl.load(weight_ptr + R + rest_C, mask=rest_C < D - R, other=0.0).to(tl.float32)
    if OFFSET:
        a_P += 1.0
        b_P += 1.0
        rest_scale_C += 1.0
    return a_P, b_P, rest_scale_C


# ---- kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr,
    N, HQ, HK, D, R, WIDTH, ROWS, Q_GROUPS,
    KEYS: tl.constexpr, INTERLEAVED: tl.constexpr, REGROUPED: tl.constexpr, BY_PAIR: tl.constexpr,
    TEMPORAL: tl.constexpr, HEIGHT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    PASSES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pair_P, rest_C = tl.arange(0, PAIRS), tl.arange(0, REST)
    group = tl.program_id(1)
    heads, first, x_ptr, out_ptr = HQ, group * HEADS, q_ptr, q_out_ptr
    weight_ptr = q_weight_ptr
    if KEYS:
        if group >= Q_GROUPS:
            heads, first, x_ptr, out_ptr = HK, (group - Q_GROUPS) * HEADS, k_ptr, k_out_ptr
            if NORM:
                weight_ptr = k_weight_ptr
    cos_a_TP, cos_b_TP = _angles(cos_ptr, token_T, pair_P, N, ROWS, R, WIDTH, INTERLEAVED, BY_PAIR, TEMPORAL, HEIGHT)
    sin_a_TP, sin_b_TP = _angles(sin_ptr, token_T, pair_P, N, ROWS, R, WIDTH, INTERLEAVED, BY_PAIR, TEMPORAL, HEIGHT)
    if NORM:
        scale_a_P, scale_b_P, scale_rest_C = _scales(weight_ptr, pair_P, rest_C, R, D, INTERLEAVED, OFFSET)
    for head in range(first, tl.minimum(first + HEADS, heads)):
        a_TP, b_TP = _load_pairs(x_ptr + head * D, token_T, pair_P, N, heads * D, R, INTERLEAVED)
        if PASSES:
            rest_TC = _load_rest(x_ptr + head * D, token_T, rest_C, N, heads * D, R, D)
        if NORM:
            square_T = tl.sum(a_TP * a_TP, axis=1) + tl.sum(b_TP * b_TP, axis=1)
            if PASSES:
                square_T += tl.sum(rest_TC * rest_TC, axis=1)
            rstd_T = tl.rsqrt(square_T / D + EPS)
            a_TP = a_TP * rstd_T[:, None] * scale_a_P[None, :]
            b_TP = b_TP * rstd_T[:, None] * scale_b_P[None, :]
            if PASSES:
                rest_TC = rest_TC * rstd_T[:, None] * scale_rest_C[None, :]
        turned_a_TP = a_TP * cos_a_TP - b_TP * sin_a_TP
        turned_b_TP = b_TP * cos_b_TP + a_TP * sin_b_TP
        _store_pairs(
            out_ptr + head * D, turned_a_TP, turned_b_TP, token_T, pair_P, N, heads * D, R,
            INTERLEAVED and not REGROUPED,
        )  # fmt: skip
        if PASSES:
            _store_rest(out_ptr + head * D, rest_TC, token_T, rest_C, N, heads * D, R, D)


@triton.jit
def _backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, dq_ptr, dk_ptr, dweight_ptr,
    N, HQ, HK, D, R, WIDTH, ROWS, Q_GROUPS,
    KEYS: tl.constexpr, INTERLEAVED: tl.constexpr, REGROUPED: tl.constexpr, BY_PAIR: tl.constexpr,
    TEMPORAL: tl.constexpr, HEIGHT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    PASSES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Gradients of the heads; with a norm, dweight [programs, groups, D] sums a program's share."""
    pair_P, rest_C = tl.arange(0, PAIRS), tl.arange(0, REST)
    group = tl.program_id(1)
    heads, first, d_out_ptr, x_ptr, dx_ptr = HQ, group * HEADS, dq_out_ptr, q_ptr, dq_ptr
    weight_ptr = q_weight_ptr
    if KEYS:
        if group >= Q_GROUPS:
            heads, first, d_out_ptr, x_ptr, dx_ptr = HK, (group - Q_GROUPS) * HEADS, dk_out_ptr, k_ptr, dk_ptr
            if NORM:
                weight_ptr = k_weight_ptr
    if NORM:
        scale_a_P, scale_b_P, scale_rest_C = _scales(weight_ptr, pair_P, rest_C, R, D, INTERLEAVED, OFFSET)
        # tokens of a tile are added up once, at the end
        dweight_a_TP = tl.zeros((TOKENS, PAIRS), tl.float32)
        dweight_b_TP = tl.zeros((TOKENS, PAIRS), tl.float32)
        dweight_rest_TC = tl.zeros((TOKENS, REST), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(N, TOKENS), tl.num_programs(0)):
        token_T = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)
        cos_a_TP, cos_b_TP = _angles(
            cos_ptr, token_T, pair_P, N, ROWS, R, WIDTH, INTERLEAVED, BY_PAIR, TEMPORAL, HEIGHT
        )
        sin_a_TP, sin_b_TP = _angles(
            sin_ptr, token_T, pair_P, N, ROWS, R, WIDTH, INTERLEAVED, BY_PAIR, TEMPORAL, HEIGHT
        )
        for head in range(first, tl.minimum(first + HEADS, heads)):
            da_TP, db_TP = _load_pairs(
                d_out_ptr + head * D, token_T, pair_P, N, heads * D, R, INTERLEAVED and not REGROUPED
            )
            back_a_TP = da_TP * cos_a_TP + db_TP * sin_b_TP
            back_b_TP = db_TP * cos_b_TP - da_TP * sin_a_TP
            if PASSES:
                back_rest_TC = _load_rest(d_out_ptr + head * D, token_T, rest_C, N, heads * D, R, D)
            if NORM:
                a_TP, b_TP = _load_pairs(x_ptr + head * D, token_T, pair_P, N, heads * D, R, INTERLEAVED)
                square_T = tl.sum(a_TP * a_TP, axis=1) + tl.sum(b_TP * b_TP, axis=1)
                if PASSES:
                    rest_TC = _load_rest(x_ptr + head * D, token_T, rest_C, N, heads * D, R, D)
                    square_T += tl.sum(rest_TC * rest_TC, axis=1)
                rstd_T = tl.rsqrt(square_T / D + EPS)
                unit_a_TP, unit_b_TP = a_TP * rstd_T[:, None], b_TP * rstd_T[:, None]
                dweight_a_TP += back_a_TP * unit_a_TP
                dweight_b_TP += back_b_TP * unit_b_TP
                back_a_TP *= scale_a_P[None, :]
                back_b_TP *= scale_b_P[None, :]
                along_T = tl.sum(back_a_TP * unit_a_TP, axis=1) + tl.sum(back_b_TP * unit_b_TP, axis=1)
                if PASSES:
                    unit_rest_TC = rest_TC * rstd_T[:, None]
                    dweight_rest_TC += back_rest_TC * unit_rest_TC
                    back_rest_TC *= scale_rest_C[None, :]
                    along_T += tl.sum(back_rest_TC * unit_rest_TC, axis=1)
                # the part of the gradient along the unit head is projected out
                along_T = along_T / D
                back_a_TP = (back_a_TP - unit_a_TP * along_T[:, None]) * rstd_T[:, None]
                back_b_TP = (back_b_TP - unit_b_TP * along_T[:, None]) * rstd_T[:, None]
                if PASSES:
                    back_rest_TC = (back_rest_TC - unit_rest_TC * along_T[:, None]) * rstd_T[:, None]
            _store_pairs(dx_ptr + head * D, back_a_TP, back_b_TP, token_T, pair_P, N, heads * D, R, INTERLEAVED)
            if PASSES:
                _store_rest(dx_ptr + head * D, back_rest_TC, token_T, rest_C, N, heads * D, R, D)
    if NORM:
        dweight_a_P, dweight_b_P = tl.sum(dweight_a_TP, axis=0), tl.sum(dweight_b_TP, axis=0)
        base = dweight_ptr + (tl.program_id(0) * tl.num_programs(1) + group).to(tl.int64) * D
        if INTERLEAVED:
            tl.store(base + 2 * pair_P, dweight_a_P, mask=pair_P < R // 2)
            tl.store(base + 2 * pair_P + 1, dweight_b_P, mask=pair_P < R // 2)
        else:
            tl.store(base + pair_P, dweight_a_P, mask=pair_P < R // 2)
            tl.store(base + R // 2 + pair_P, dweight_b_P, mask=pair_P < R // 2)
        if PASSES:
            tl.store(base + R + rest_C, tl.sum(dweight_rest_TC, axis=0), mask=rest_C < D - R)


# ---- host ------------------------------------------------------------------------------------------------------


def bucket(tensors, spec):
    """Configurations depend on the head size only."""
    return {"head_dim": tensors["q"].shape[-1]}


def outputs_like(tensors, spec, config):
    """Empty q_out and k_out; nothing is saved."""
    outputs = {"q_out": torch.empty_like(tensors["q"])}
    if spec.keys:
        outputs["k_out"] = torch.empty_like(tensors["k"])
    return outputs, {}


def groups(tensors, spec, config):
    """Groups of heads that programs take, of q and of k."""
    of_q = -(-tensors["q"].shape[2] // config["heads"])
    return of_q, -(-tensors["k"].shape[2] // config["heads"]) if spec.keys else 0


def channels(cos, spec):
    """How many channels of a head turn."""
    return 2 * cos.shape[-1] if spec.angles == "half" else cos.shape[-1]


def next_power(size):
    """The least power of two that is not smaller, at least 1."""
    return 1 << (max(size, 1) - 1).bit_length()


def forward(tensors, spec, config):
    """q_out and k_out; nothing is saved."""
    outputs, saved = outputs_like(tensors, spec, config)
    q, cos = tensors["q"], tensors["cos"]
    tokens, size, turned = q.shape[0] * q.shape[1], q.shape[3], channels(cos, spec)
    if tokens > 0:
        of_q, of_k = groups(tensors, spec, config)
        _forward_kernel[(-(-tokens // config["tokens"]), of_q + of_k)](
            q,
            tensors["k"] if spec.keys else None,
            cos,
            tensors["sin"],
            tensors["q_weight"] if spec.norm else None,
            tensors["k_weight"] if spec.norm and spec.keys else None,
            outputs["q_out"],
            outputs["k_out"] if spec.keys else None,
            tokens,
            q.shape[2],
            tensors["k"].shape[2] if spec.keys else 0,
            size,
            turned,
            cos.shape[-1],
            cos.shape[-3] * cos.shape[-2],
            of_q,
            KEYS=spec.keys,
            INTERLEAVED=spec.pairs == "interleaved",
            REGROUPED=spec.regrouped,
            BY_PAIR=spec.angles != "channel",
            TEMPORAL=spec.temporal,
            HEIGHT=spec.height,
            NORM=spec.norm,
            EPS=spec.eps,
            OFFSET=spec.offset,
            PASSES=size > turned,
            TOKENS=config["tokens"],
            HEADS=config["heads"],
            PAIRS=next_power(turned // 2),
            REST=next_power(size - turned),
            num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; a gradient that did not come in counts as zero."""
    q, cos = tensors["q"], tensors["cos"]
    tokens, size, turned = q.shape[0] * q.shape[1], q.shape[3], channels(cos, spec)
    of_q, of_k = groups(tensors, spec, config)
    dq_out = grads["q_out"]
    if dq_out is None:
        dq_out = q.new_zeros(q.shape)
    dk_out = None
    found = {"q": torch.empty_like(q)}
    if spec.keys:
        dk_out = grads["k_out"]
        if dk_out is None:
            dk_out = tensors["k"].new_zeros(tensors["k"].shape)
        found["k"] = torch.empty_like(tensors["k"])
    tiles = -(-tokens // config["tokens"])
    programs = min(tiles, config["programs"]) if spec.norm else tiles
    dweight = q.new_empty((programs, of_q + of_k, size), dtype=torch.float32) if spec.norm else None
    if tokens > 0:
        _backward_kernel[(programs, of_q + of_k)](
            dq_out,
            dk_out,
            q if spec.norm else None,
            tensors["k"] if spec.norm and spec.keys else None,
            cos,
            tensors["sin"],
            tensors["q_weight"] if spec.norm else None,
            tensors["k_weight"] if spec.norm and spec.keys else None,
            found["q"],
            found["k"] if spec.keys else None,
            dweight,
            tokens,
            q.shape[2],
            tensors["k"].shape[2] if spec.keys else 0,
            size,
            turned,
            cos.shape[-1],
            cos.shape[-3] * cos.shape[-2],
            of_q,
            KEYS=spec.keys,
            INTERLEAVED=spec.pairs == "interleaved",
            REGROUPED=spec.regrouped,
            BY_PAIR=spec.angles != "channel",
            TEMPORAL=spec.temporal,
            HEIGHT=spec.height,
            NORM=spec.norm,
            EPS=spec.eps,
            OFFSET=spec.offset,
            PASSES=size > turned,
            TOKENS=config["tokens"],
            HEADS=config["heads"],
            PAIRS=next_power(turned // 2),
            REST=next_power(size - turned),
            num_warps=config["num_warps"],
        )
    if spec.norm:
        found["q_weight"] = dweight.narrow(1, 0, of_q).sum((0, 1)).to(tensors["q_weight"].dtype)
        if spec.keys:
            found["k_weight"] = dweight.narrow(1, of_q, of_k).sum((0, 1)).to(tensors["k_weight"].dtype)
    return {name: found[name] for name in needs}
