"""Hyper-connections: coefficients of the streams and their collapse, forward and backward.

n streams x [N, n, C] of N tokens are one row of S = n C numbers each. What a token's coefficients need, all S of them,
is known only after a full pass, so forward reads x twice and backward twice; nothing of its size is kept but x itself.

    forward   mix_kernel             mix = r (x fn^T), r = rsqrt(mean x^2 + eps): a skinny product over S
              coefficients_kernel    post and comb of a tile of tokens; Sinkhorn on n x n numbers a thread
              collapse_kernel        h = sum_i pre_i x_i
    backward  dots_kernel            dpre_i = <x_i, dh>
              coefficients_kernel    again, writing down the sums that Sinkhorn divided by
              logits_kernel          gradients of mix, scale and base: the rounds in reverse, unrolled
              streams_kernel         dx = pre dh + r dmix fn - x r^2 <dmix, mix> / S, and partial sums of dfn

The rounds are differentiated as they are, not their fixed point: with wide logits 20 rounds have not converged, and the
implicit gradient is off by up to tens of per cent. The reverse pass walks back by multiplying with the sums.

Legend: T tokens of a tile, M columns of the product (padded), S numbers of a row, C channels of one stream, I and J
streams (padded) of comb. mix and r are saved in fp32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def mix_kernel(
    x, fn, mix, r, N, S,
    EPS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    token_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    column_M = tl.arange(0, M)
    sum_TM = tl.zeros((T, M), tl.float32)
    square_T = tl.zeros((T,), tl.float32)
    for start in range(0, S, BLOCK_S):
        at_S = start + tl.arange(0, BLOCK_S)
        inside_TS = (token_T < N)[:, None] & (at_S < S)[None, :]
        x_TS = tl.load(x + token_T[:, None] * S + at_S[None, :], mask=inside_TS, other=0.0)
        inside_SM = (at_S < S)[:, None] & (column_M < COLUMNS)[None, :]
        fn_SM = tl.load(fn + column_M[None, :] * S + at_S[:, None], mask=inside_SM, other=0.0)
        wide_TS = x_TS.to(tl.float32)
        square_T += tl.sum(wide_TS * wide_TS, axis=1)
        if x.dtype.element_ty == fn.dtype.element_ty:
            sum_TM = tl.dot(x_TS, fn_SM, sum_TM, input_precision=PRECISION)
        else:
            sum_TM = tl.dot(wide_TS, fn_SM.to(tl.float32), sum_TM, input_precision=PRECISION)
    r_T = tl.rsqrt(square_T / S + EPS)
    inside_TM = (token_T < N)[:, None] & (column_M < COLUMNS)[None, :]
    tl.store(mix + token_T[:, None] * COLUMNS + column_M[None, :], sum_TM * r_T[:, None], mask=inside_TM)
    tl.store(r + token_T, r_T, mask=token_T < N)


@triton.jit
def gates(mix, base, scale, part, token_T, N, FIRST: tl.constexpr, COLUMNS: tl.constexpr, n: tl.constexpr,
          PAD: tl.constexpr):  # fmt: skip
    """sigmoid(mix scale + base) [T, I] and mix [T, I] of pre (part 0, FIRST 0) or post; zeros beyond n streams."""
    at_I = tl.arange(0, PAD)
    inside_TI = (token_T < N)[:, None] & (at_I < n)[None, :]
    mix_TI = tl.load(mix + token_T[:, None] * COLUMNS + (FIRST + at_I)[None, :], mask=inside_TI, other=0.0)
    base_I = tl.load(base + FIRST + at_I, mask=at_I < n, other=0.0).to(tl.float32)
    logit_TI = mix_TI * tl.load(scale + part).to(tl.float32) + base_I[None, :]
    return tl.sigmoid(logit_TI), mix_TI


@triton.jit
def comb_start(mix, base, scale, token_T, N, FIRST: tl.constexpr, COLUMNS: tl.constexpr, n: tl.constexpr,
               PAD: tl.constexpr):  # fmt: skip
    """softmax over columns [T, I, J], and mix [T, I, J]; zeros beyond n streams."""
    at_IJ = tl.arange(0, PAD)[:, None] * n + tl.arange(0, PAD)[None, :]
    real_IJ = (tl.arange(0, PAD) < n)[:, None] & (tl.arange(0, PAD) < n)[None, :]
    inside_TIJ = (token_T < N)[:, None, None] & real_IJ[None, :, :]
    at_TIJ = (token_T * COLUMNS)[:, None, None] + (FIRST + at_IJ)[None, :, :]
    mix_TIJ = tl.load(mix + at_TIJ, mask=inside_TIJ, other=0.0)
    base_IJ = tl.load(base + FIRST + at_IJ, mask=real_IJ, other=0.0).to(tl.float32)
    logit_TIJ = mix_TIJ * tl.load(scale + 2).to(tl.float32) + base_IJ[None, :, :]
    logit_TIJ = tl.where(real_IJ[None, :, :], logit_TIJ, -1e30)
    power_TIJ = tl.exp(logit_TIJ - tl.max(logit_TIJ, axis=2, keep_dims=True))
    power_TIJ = tl.where(real_IJ[None, :, :], power_TIJ, 0.0)
    total_TIJ = tl.sum(power_TIJ, axis=2, keep_dims=True)
    return power_TIJ / tl.where(total_TIJ > 0, total_TIJ, 1.0), mix_TIJ


@triton.jit
def coefficients_kernel(
    mix, base, scale, post, comb, sums, N,
    POST_FACTOR: tl.constexpr, POST_FLOOR: tl.constexpr, FLOOR: tl.constexpr, ROUNDS: tl.constexpr,
    COLUMNS: tl.constexpr, n: tl.constexpr, HISTORY: tl.constexpr, T: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Post [N, n] and comb [N, n, n]; or, for backward, only the sums [N, 2 ROUNDS - 1, n] that comb was divided by."""
    token_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    at_I = tl.arange(0, PAD)
    inside_TI = (token_T < N)[:, None] & (at_I < n)[None, :]
    if not HISTORY:
        gate_TI, _mix_TI = gates(mix, base, scale, 1, token_T, N, FIRST=n, COLUMNS=COLUMNS, n=n, PAD=PAD)
        tl.store(post + token_T[:, None] * n + at_I[None, :], POST_FACTOR * gate_TI + POST_FLOOR, mask=inside_TI)
    if ROUNDS > 0:
        soft_TIJ, _mix_TIJ = comb_start(mix, base, scale, token_T, N, FIRST=2 * n, COLUMNS=COLUMNS, n=n, PAD=PAD)
        real_IJ = (at_I < n)[:, None] & (at_I < n)[None, :]
        comb_TIJ = tl.where(real_IJ[None, :, :], soft_TIJ + FLOOR, 0.0)
        at_TI = token_T[:, None] * ((2 * ROUNDS - 1) * n) + at_I[None, :]
        for step in range(0, ROUNDS):
            if step > 0:
                row_TI = tl.sum(comb_TIJ, axis=2) + FLOOR
                comb_TIJ = comb_TIJ / row_TI[:, :, None]
                if HISTORY:
                    tl.store(sums + at_TI + (2 * step - 1) * n, row_TI, mask=inside_TI)
            column_TJ = tl.sum(comb_TIJ, axis=1) + FLOOR
            comb_TIJ = comb_TIJ / column_TJ[:, None, :]
            if HISTORY:
                tl.store(sums + at_TI + 2 * step * n, column_TJ, mask=inside_TI)
        if not HISTORY:
            at_TIJ = (token_T * n * n)[:, None, None] + (at_I[:, None] * n + at_I[None, :])[None, :, :]
            inside_TIJ = (token_T < N)[:, None, None] & real_IJ[None, :, :]
            tl.store(comb + at_TIJ, comb_TIJ, mask=inside_TIJ)


@triton.jit
def gate_of(mix, base, scale, i, token_T, N, COLUMNS: tl.constexpr):
    """sigmoid of stream i's pre logit [T]."""
    mix_T = tl.load(mix + token_T * COLUMNS + i, mask=token_T < N, other=0.0)
    return tl.sigmoid(mix_T * tl.load(scale).to(tl.float32) + tl.load(base + i).to(tl.float32))


@triton.jit
def collapse_kernel(
    x, mix, base, scale, h, N, C,
    FLOOR: tl.constexpr, COLUMNS: tl.constexpr, n: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    at_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_TC = (token_T < N)[:, None] & (at_C < C)[None, :]
    sum_TC = tl.zeros((T, BLOCK_C), tl.float32)
    for i in tl.static_range(n):
        pre_T = gate_of(mix, base, scale, i, token_T, N, COLUMNS=COLUMNS) + FLOOR
        x_TC = tl.load(x + (token_T * n + i)[:, None] * C + at_C[None, :], mask=inside_TC, other=0.0)
        sum_TC += pre_T[:, None] * x_TC.to(tl.float32)
    tl.store(h + token_T[:, None] * C + at_C[None, :], sum_TC.to(h.dtype.element_ty), mask=inside_TC)


@triton.jit
def dots_kernel(
    x, dh, d_pre, N, C, n: tl.constexpr, T: tl.constexpr, PAD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """<x_i, dh> [N, n]."""
    token_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    at_I = tl.arange(0, PAD)
    dots_TI = tl.zeros((T, PAD), tl.float32)
    for start in range(0, C, BLOCK_C):
        at_C = start + tl.arange(0, BLOCK_C)
        inside_TC = (token_T < N)[:, None] & (at_C < C)[None, :]
        dh_TC = tl.load(dh + token_T[:, None] * C + at_C[None, :], mask=inside_TC, other=0.0).to(tl.float32)
        for i in tl.static_range(n):
            x_TC = tl.load(x + (token_T * n + i)[:, None] * C + at_C[None, :], mask=inside_TC, other=0.0)
            dot_T = tl.sum(x_TC.to(tl.float32) * dh_TC, axis=1)
            dots_TI += tl.where((at_I == i)[None, :], dot_T[:, None], 0.0)
    inside_TI = (token_T < N)[:, None] & (at_I < n)[None, :]
    tl.store(d_pre + token_T[:, None] * n + at_I[None, :], dots_TI, mask=inside_TI)


@triton.jit
def gate_gradients(
    gate_TI, mix_TI, flow_TI, part, d_mix, d_base, d_scale, scale, token_T, N,
    FIRST: tl.constexpr, COLUMNS: tl.constexpr, n: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Through a sigmoid: writes the gradient of mix and the partial sums of base and scale; returns <dmix, mix> [T]."""
    at_I = tl.arange(0, PAD)
    inside_TI = (token_T < N)[:, None] & (at_I < n)[None, :]
    d_logit_TI = tl.where(inside_TI, flow_TI * gate_TI * (1.0 - gate_TI), 0.0)
    d_mix_TI = d_logit_TI * tl.load(scale + part).to(tl.float32)
    tl.store(d_mix + token_T[:, None] * COLUMNS + (FIRST + at_I)[None, :], d_mix_TI, mask=inside_TI)
    program = tl.program_id(0)
    tl.store(d_base + program * COLUMNS + FIRST + at_I, tl.sum(d_logit_TI, axis=0), mask=at_I < n)
    tl.store(d_scale + program * PARTS + part, tl.sum(tl.sum(d_logit_TI * mix_TI, axis=1), axis=0))
    return tl.sum(d_mix_TI * mix_TI, axis=1)


@triton.jit
def logits_kernel(
    mix, base, scale, sums, d_pre, d_post, d_comb, d_mix, along, d_base, d_scale, N,
    POST: tl.constexpr, POST_FACTOR: tl.constexpr, FLOOR: tl.constexpr, ROUNDS: tl.constexpr,
    POST_GRADIENT: tl.constexpr, COMB_GRADIENT: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    n: tl.constexpr, T: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Gradient of mix [N, M], <dmix, mix> [N], and one partial sum a program of the gradients of base and scale."""
    token_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    at_I = tl.arange(0, PAD)
    inside_TI = (token_T < N)[:, None] & (at_I < n)[None, :]
    gate_TI, mix_TI = gates(mix, base, scale, 0, token_T, N, FIRST=0, COLUMNS=COLUMNS, n=n, PAD=PAD)
    flow_TI = tl.load(d_pre + token_T[:, None] * n + at_I[None, :], mask=inside_TI, other=0.0)
    along_T = gate_gradients(
        gate_TI, mix_TI, flow_TI, 0, d_mix, d_base, d_scale, scale, token_T, N,
        FIRST=0, COLUMNS=COLUMNS, n=n, PARTS=PARTS, PAD=PAD,
    )  # fmt: skip
    if POST:
        gate_TI, mix_TI = gates(mix, base, scale, 1, token_T, N, FIRST=n, COLUMNS=COLUMNS, n=n, PAD=PAD)
        flow_TI = tl.zeros((T, PAD), tl.float32)
        if POST_GRADIENT:
            flow_TI = tl.load(d_post + token_T[:, None] * n + at_I[None, :], mask=inside_TI, other=0.0).to(tl.float32)
        along_T += gate_gradients(
            gate_TI, mix_TI, flow_TI * POST_FACTOR, 1, d_mix, d_base, d_scale, scale, token_T, N,
            FIRST=n, COLUMNS=COLUMNS, n=n, PARTS=PARTS, PAD=PAD,
        )  # fmt: skip
    if ROUNDS > 0:
        soft_TIJ, mix_TIJ = comb_start(mix, base, scale, token_T, N, FIRST=2 * n, COLUMNS=COLUMNS, n=n, PAD=PAD)
        at_IJ = at_I[:, None] * n + at_I[None, :]
        real_IJ = (at_I < n)[:, None] & (at_I < n)[None, :]
        inside_TIJ = (token_T < N)[:, None, None] & real_IJ[None, :, :]
        flow_TIJ = tl.zeros((T, PAD, PAD), tl.float32)
        if COMB_GRADIENT:
            at_TIJ = (token_T * n * n)[:, None, None] + at_IJ[None, :, :]
            flow_TIJ = tl.load(d_comb + at_TIJ, mask=inside_TIJ, other=0.0).to(tl.float32)
            sums_TI = sums + token_T[:, None] * ((2 * ROUNDS - 1) * n) + at_I[None, :]
            # forward to the last state by the stored sums, then back: y = c / s with s = sum c + floor gives
            # dc = (dy - sum dy y) / s, and c = y s
            state_TIJ = tl.where(real_IJ[None, :, :], soft_TIJ + FLOOR, 0.0)
            for step in range(0, ROUNDS):
                if step > 0:
                    row_TI = tl.load(sums_TI + (2 * step - 1) * n, mask=inside_TI, other=1.0)
                    state_TIJ = state_TIJ / row_TI[:, :, None]
                column_TJ = tl.load(sums_TI + 2 * step * n, mask=inside_TI, other=1.0)
                state_TIJ = state_TIJ / column_TJ[:, None, :]
            for back in range(0, ROUNDS):
                step = ROUNDS - 1 - back
                column_TJ = tl.load(sums_TI + 2 * step * n, mask=inside_TI, other=1.0)
                flow_TIJ = (flow_TIJ - tl.sum(flow_TIJ * state_TIJ, axis=1)[:, None, :]) / column_TJ[:, None, :]
                state_TIJ = state_TIJ * column_TJ[:, None, :]
                if step > 0:
                    row_TI = tl.load(sums_TI + (2 * step - 1) * n, mask=inside_TI, other=1.0)
                    flow_TIJ = (flow_TIJ - tl.sum(flow_TIJ * state_TIJ, axis=2)[:, :, None]) / row_TI[:, :, None]
                    state_TIJ = state_TIJ * row_TI[:, :, None]
            flow_TIJ = soft_TIJ * (flow_TIJ - tl.sum(flow_TIJ * soft_TIJ, axis=2)[:, :, None])
        flow_TIJ = tl.where(inside_TIJ, flow_TIJ, 0.0)
        d_mix_TIJ = flow_TIJ * tl.load(scale + 2).to(tl.float32)
        at_TIJ = (token_T * COLUMNS + 2 * n)[:, None, None] + at_IJ[None, :, :]
        tl.store(d_mix + at_TIJ, d_mix_TIJ, mask=inside_TIJ)
        program = tl.program_id(0)
        tl.store(d_base + program * COLUMNS + 2 * n + at_IJ, tl.sum(flow_TIJ, axis=0), mask=real_IJ)
        shares_T = tl.sum(tl.sum(flow_TIJ * mix_TIJ, axis=2), axis=1)
        tl.store(d_scale + program * PARTS + 2, tl.sum(shares_T, axis=0))
        along_T += tl.sum(tl.sum(d_mix_TIJ * mix_TIJ, axis=2), axis=1)
    tl.store(along + token_T, along_T, mask=token_T < N)


@triton.jit
def streams_kernel(
    x, dh, fn, mix, base, scale, r, d_mix, along, dx, d_fn, N, C,
    FLOOR: tl.constexpr, COLUMNS: tl.constexpr, n: tl.constexpr, H_GRADIENT: tl.constexpr,
    X_GRADIENT: tl.constexpr, FN_GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One block of columns of one stream over every P-th tile of tokens: dx, and a partial sum of dfn."""
    # the streams of a block of columns run at the same time: dh is read from memory once
    i = tl.program_id(0) % n
    at_C = (tl.program_id(0) // n) * BLOCK_C + tl.arange(0, BLOCK_C)
    column_M = tl.arange(0, M)
    inside_MC = (column_M < COLUMNS)[:, None] & (at_C < C)[None, :]
    at_MC = column_M[:, None] * (n * C) + i * C + at_C[None, :]
    fn_MC = tl.load(fn + at_MC, mask=inside_MC, other=0.0)
    # d_mix as a sum of two bf16 numbers has 16 bits, and the products take x and fn as they are stored
    SPLIT: tl.constexpr = (x.dtype.element_ty == tl.bfloat16) and (fn.dtype.element_ty == tl.bfloat16)
    if not SPLIT:
        fn_MC = fn_MC.to(tl.float32)
    d_fn_MC = tl.zeros((M, BLOCK_C), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(N, T), tl.num_programs(1), num_stages=STAGES):
        token_T = tl.cast(tile, tl.int64) * T + tl.arange(0, T)
        inside_TC = (token_T < N)[:, None] & (at_C < C)[None, :]
        at_TC = (token_T * n + i)[:, None] * C + at_C[None, :]
        raw_TC = tl.load(x + at_TC, mask=inside_TC, other=0.0)
        x_TC = raw_TC.to(tl.float32)
        r_T = tl.load(r + token_T, mask=token_T < N, other=0.0)
        inside_TM = (token_T < N)[:, None] & (column_M < COLUMNS)[None, :]
        d_mix_TM = tl.load(d_mix + token_T[:, None] * COLUMNS + column_M[None, :], mask=inside_TM, other=0.0)
        d_mix_TM = d_mix_TM * r_T[:, None]
        if SPLIT:
            high_TM = d_mix_TM.to(x.dtype.element_ty)
            low_TM = (d_mix_TM - high_TM.to(tl.float32)).to(x.dtype.element_ty)
        if FN_GRADIENT:
            if SPLIT:
                d_fn_MC = tl.dot(tl.trans(high_TM), raw_TC, d_fn_MC)
                d_fn_MC = tl.dot(tl.trans(low_TM), raw_TC, d_fn_MC)
            else:
                d_fn_MC = tl.dot(tl.trans(d_mix_TM), x_TC, d_fn_MC, input_precision=PRECISION)
        if X_GRADIENT:
            along_T = tl.load(along + token_T, mask=token_T < N, other=0.0)
            if SPLIT:
                dx_TC = tl.dot(high_TM, fn_MC)
                dx_TC = tl.dot(low_TM, fn_MC, dx_TC)
            else:
                dx_TC = tl.dot(d_mix_TM, fn_MC, input_precision=PRECISION)
            dx_TC -= x_TC * (r_T * r_T * along_T / (n * C))[:, None]
            if H_GRADIENT:
                pre_T = gate_of(mix, base, scale, i, token_T, N, COLUMNS=COLUMNS) + FLOOR
                dh_TC = tl.load(dh + token_T[:, None] * C + at_C[None, :], mask=inside_TC, other=0.0)
                dx_TC += pre_T[:, None] * dh_TC.to(tl.float32)
            tl.store(dx + at_TC, dx_TC.to(dx.dtype.element_ty), mask=inside_TC)
    if FN_GRADIENT:
        start = tl.program_id(1).to(tl.int64) * (COLUMNS * n) * C
        tl.store(d_fn + start + at_MC, d_fn_MC, mask=inside_MC)


def bucket(tensors, spec):
    """Configurations depend on the width of a stream."""
    return {"hidden": tensors["x"].shape[-1]}


def outputs_like(tensors, spec, config):
    """Empty h [..., C] in x's dtype, post [..., n] and comb [..., n, n] fp32; saved: mix [..., M] and r [...] fp32."""
    x = tensors["x"]
    lead = x.shape[:-2]
    outputs = {"h": x.new_empty((*lead, x.shape[-1]))}
    if spec.post:
        outputs["post"] = x.new_empty((*lead, spec.streams), dtype=torch.float32)
    if spec.rounds > 0:
        outputs["comb"] = x.new_empty((*lead, spec.streams, spec.streams), dtype=torch.float32)
    saved = {
        "mix": x.new_empty((*lead, tensors["base"].shape[0]), dtype=torch.float32),
        "r": x.new_empty(lead, dtype=torch.float32),
    }
    return outputs, saved


def forward(tensors, spec, config):
    """The outputs, and what backward needs: mix and r.

    Raises:
        ValueError: x has another number of streams.
    """
    x, fn, base, scale = tensors["x"], tensors["fn"], tensors["base"], tensors["scale"]
    if x.shape[-2] != spec.streams:
        raise ValueError(f"x has {x.shape[-2]} streams, not {spec.streams}")
    outputs, saved = outputs_like(tensors, spec, config)
    tokens, hidden, columns = saved["r"].numel(), x.shape[-1], base.shape[0]
    if tokens > 0 and hidden > 0:
        mix_kernel[(-(-tokens // config["mix_tokens"]),)](
            x, fn, saved["mix"], saved["r"], tokens, spec.streams * hidden,
            EPS=spec.eps, COLUMNS=columns, PRECISION="tf32x3",
            T=config["mix_tokens"], M=max(16, triton.next_power_of_2(columns)), BLOCK_S=config["mix_columns"],
            num_warps=config["mix_warps"],
        )  # fmt: skip
        if spec.post:
            coefficients_kernel[(-(-tokens // config["coefficient_tokens"]),)](
                saved["mix"], base, scale, outputs["post"], outputs["comb"] if spec.rounds > 0 else None, None, tokens,
                POST_FACTOR=spec.post_factor, POST_FLOOR=spec.post_floor, FLOOR=spec.floor, ROUNDS=spec.rounds,
                COLUMNS=columns, n=spec.streams, HISTORY=False,
                T=config["coefficient_tokens"], PAD=triton.next_power_of_2(spec.streams),
                num_warps=config["coefficient_warps"],
            )  # fmt: skip
        block = min(config["stream_columns"], triton.next_power_of_2(hidden))
        collapse_kernel[(-(-tokens // config["stream_tokens"]), -(-hidden // block))](
            x, saved["mix"], base, scale, outputs["h"], tokens, hidden,
            FLOOR=spec.floor, COLUMNS=columns, n=spec.streams, T=config["stream_tokens"], BLOCK_C=block,
            num_warps=config["stream_warps"],
        )  # fmt: skip
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; a gradient that did not come in counts as zero."""
    x, fn, base, scale = tensors["x"], tensors["fn"], tensors["base"], tensors["scale"]
    mix, r = saved["mix"], saved["r"]
    tokens, hidden, n = r.numel(), x.shape[-1], spec.streams
    columns, parts = base.shape[0], scale.shape[0]
    dh = grads["h"]
    d_post = grads["post"] if spec.post else None
    d_comb = grads["comb"] if spec.rounds > 0 else None
    pad = triton.next_power_of_2(n)
    programs = -(-tokens // config["coefficient_tokens"])
    d_pre = torch.zeros_like(mix[..., :n]) if dh is None else mix.new_empty((*r.shape, n))
    d_mix, along = torch.empty_like(mix), torch.empty_like(r)
    d_base = mix.new_empty((programs, columns))
    d_scale = mix.new_empty((programs, parts))
    block = min(config["gradient_columns"], triton.next_power_of_2(max(hidden, 1)))
    splits = min(-(-tokens // config["gradient_tokens"]), config["gradient_splits"])
    dx = torch.empty_like(x) if "x" in needs else None
    d_fn = mix.new_empty((splits, *fn.shape)) if "fn" in needs else None
    if tokens > 0 and hidden > 0:
        if dh is not None:
            dots_block = min(config["stream_columns"], triton.next_power_of_2(hidden))
            dots_kernel[(-(-tokens // config["stream_tokens"]),)](
                x, dh, d_pre, tokens, hidden,
                n=n, T=config["stream_tokens"], PAD=pad, BLOCK_C=dots_block, num_warps=config["stream_warps"],
            )  # fmt: skip
        sums = None
        if d_comb is not None:
            sums = mix.new_empty((tokens, 2 * spec.rounds - 1, n))
            coefficients_kernel[(programs,)](
                mix, base, scale, None, None, sums, tokens,
                POST_FACTOR=spec.post_factor, POST_FLOOR=spec.post_floor, FLOOR=spec.floor, ROUNDS=spec.rounds,
                COLUMNS=columns, n=n, HISTORY=True,
                T=config["coefficient_tokens"], PAD=pad, num_warps=config["coefficient_warps"],
            )  # fmt: skip
        logits_kernel[(programs,)](
            mix, base, scale, sums, d_pre, d_post, d_comb, d_mix, along, d_base, d_scale, tokens,
            POST=spec.post, POST_FACTOR=spec.post_factor, FLOOR=spec.floor, ROUNDS=spec.rounds,
            POST_GRADIENT=d_post is not None, COMB_GRADIENT=d_comb is not None, COLUMNS=columns,
            PARTS=parts, n=n, T=config["coefficient_tokens"], PAD=pad, num_warps=config["coefficient_warps"],
        )  # fmt: skip
        if dx is not None or d_fn is not None:
            streams_kernel[(n * (-(-hidden // block)), splits)](
                x, dh, fn, mix, base, scale, r, d_mix, along, dx, d_fn, tokens, hidden,
                FLOOR=spec.floor, COLUMNS=columns, n=n, H_GRADIENT=dh is not None,
                X_GRADIENT=dx is not None, FN_GRADIENT=d_fn is not None,
                PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
                T=config["gradient_tokens"], M=max(16, triton.next_power_of_2(columns)), BLOCK_C=block,
                STAGES=config["gradient_stages"], num_warps=config["gradient_warps"],
            )  # fmt: skip
    gradients = {}
    if "x" in needs:
        gradients["x"] = dx
    if "fn" in needs:
        gradients["fn"] = d_fn.sum(0).to(fn.dtype)
    if "base" in needs:
        gradients["base"] = d_base.sum(0).to(base.dtype)
    if "scale" in needs:
        gradients["scale"] = d_scale.sum(0).to(scale.dtype)
    return gradients
