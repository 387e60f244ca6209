"""Attention residuals, forward and backward: a softmax over L sources for each token, each source read once each way.

Tensors are rows [N, D] (leading dims flattened), the sources a tuple of L of them. A program holds whole rows; a row of
a source stays in registers from its score to its use, so forward needs no second pass: the running average is rescaled
when a larger score comes. Backward needs <dh, h> before any gradient: it is taken from the stored output, so one
pass is enough there too. It walks its tiles with a fixed stride and keeps the query's gradient of all of them in
registers: one partial sum a program, added up afterwards, so two runs are bitwise equal.

Legend: N rows, D hidden size, L sources; suffix _RD is a tile [ROWS, BLOCK_D], _RL [ROWS, sources], _R one value a row.
"""

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 1 << 20  # most elements that a Triton tile may have


@triton.jit
def forward_kernel(
    sources, query_ptr, h_ptr, score_ptr, rstd_ptr, N, D,
    SOURCES: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, BLOCK_D)
    at_RD = row_R[:, None] * D + col_D[None, :]
    inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]
    query_D = tl.load(query_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    most_R = tl.full((ROWS,), -float("inf"), tl.float32)
    sum_R = tl.zeros((ROWS,), tl.float32)
    h_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i in tl.static_range(SOURCES):
        v_RD = tl.load(sources[i] + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        rstd_R = tl.rsqrt(tl.sum(v_RD * v_RD, axis=1) / D + EPS)
        score_R = SCALE * rstd_R * tl.sum(v_RD * query_D[None, :], axis=1)
        tl.store(score_ptr + row_R * SOURCES + i, score_R, mask=row_R < N)
        tl.store(rstd_ptr + row_R * SOURCES + i, rstd_R, mask=row_R < N)
        now_R = tl.maximum(most_R, score_R)
        kept_R = tl.exp(most_R - now_R)
        weight_R = tl.exp(score_R - now_R)
        h_RD = h_RD * kept_R[:, None] + v_RD * weight_R[:, None]
        sum_R = sum_R * kept_R + weight_R
        most_R = now_R
    h_RD /= sum_R[:, None]
    tl.store(h_ptr + at_RD, h_RD.to(h_ptr.dtype.element_ty), mask=inside_RD)


@triton.jit(do_not_specialize=["first"])
def backward_kernel(
    dh_ptr, h_ptr, sources, query_ptr, score_ptr, rstd_ptr, gradients, dquery_ptr, first, total, N, D,
    SOURCES: tl.constexpr, SCALE: tl.constexpr, WANTED: tl.constexpr, QUERY_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Gradients of SOURCES sources from number ``first`` on, of ``total`` that share in the softmax."""
    program = tl.program_id(0)
    col_D = tl.arange(0, BLOCK_D)
    at_L = tl.arange(0, L)
    query_D = tl.load(query_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    # a tile, not its sum over rows: that is a reduction a source otherwise
    dquery_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for tile in tl.range(program, tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=1):
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at_RD = row_R[:, None] * D + col_D[None, :]
        inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]
        dh_RD = tl.load(dh_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        h_RD = tl.load(h_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        along_R = tl.sum(dh_RD * h_RD, axis=1)
        inside_RL = (row_R < N)[:, None] & (at_L < total)[None, :]
        score_RL = tl.load(score_ptr + row_R[:, None] * total + at_L[None, :], mask=inside_RL, other=-float("inf"))
        # rows past the end have no scores
        most_R = tl.where(row_R < N, tl.max(score_RL, axis=1), 0.0)
        sum_R = tl.where(row_R < N, tl.sum(tl.exp(score_RL - most_R[:, None]), axis=1), 1.0)
        for i in tl.static_range(SOURCES):
            v_RD = tl.load(sources[i] + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
            score_R = tl.load(score_ptr + row_R * total + first + i, mask=row_R < N, other=0.0)
            rstd_R = tl.load(rstd_ptr + row_R * total + first + i, mask=row_R < N, other=0.0)
            weight_R = tl.exp(score_R - most_R) / sum_R
            dscore_R = weight_R * (tl.sum(dh_RD * v_RD, axis=1) - along_R)
            toward_R = SCALE * dscore_R * rstd_R
            if QUERY_GRADIENT:
                dquery_RD += v_RD * toward_R[:, None]
            if (WANTED >> i) & 1:
                shrink_R = dscore_R * score_R * rstd_R * rstd_R / D
                dv_RD = dh_RD * weight_R[:, None] + query_D[None, :] * toward_R[:, None] - v_RD * shrink_R[:, None]
                tl.store(gradients[i] + at_RD, dv_RD.to(gradients[i].dtype.element_ty), mask=inside_RD)
    if QUERY_GRADIENT:
        tl.store(dquery_ptr + program.to(tl.int64) * D + col_D, tl.sum(dquery_RD, axis=0), mask=col_D < D)


def traits(spec):
    """Backward reads the output, which the next layer keeps anyway."""
    return {"saved_outputs": ("h",)}


def bucket(tensors, spec):
    """Configurations depend on the hidden size only."""
    return {"hidden": tensors["v0"].shape[-1]}


def outputs_like(tensors, spec, config):
    """Empty h [..., D]; saved: h again, scores and rsqrt of mean squares [..., L] fp32."""
    v = tensors["v0"]
    h = torch.empty_like(v)
    score = v.new_empty((*v.shape[:-1], spec.sources), dtype=torch.float32)
    return {"h": h}, {"h": h, "score": score, "rstd": torch.empty_like(score)}


def sources_of(tensors, spec):
    """The sources in order.

    Raises:
        ValueError: they differ in shape.
    """
    found = tuple(tensors[f"v{i}"] for i in range(spec.sources))
    if any(v.shape != found[0].shape for v in found):
        raise ValueError(f"all sources must have the shape of v0, {tuple(found[0].shape)}")
    return found


def forward(tensors, spec, config):
    """The output, and what backward needs.

    Raises:
        ValueError: the hidden size exceeds MAX_HIDDEN, or sources differ in shape.
    """
    sources = sources_of(tensors, spec)
    hidden = sources[0].shape[-1]
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden size {hidden} exceeds {MAX_HIDDEN}")
    outputs, saved = outputs_like(tensors, spec, config)
    rows = saved["score"].numel() // spec.sources
    if rows > 0 and hidden > 0:
        forward_kernel[(triton.cdiv(rows, config["forward_rows"]),)](
            sources, tensors["query"], outputs["h"], saved["score"], saved["rstd"], rows, hidden,
            SOURCES=spec.sources, EPS=spec.eps, SCALE=spec.scale,
            ROWS=config["forward_rows"], BLOCK_D=triton.next_power_of_2(hidden), num_warps=config["forward_warps"],
        )  # fmt: skip
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``."""
    sources = sources_of(tensors, spec)
    hidden = sources[0].shape[-1]
    rows = saved["score"].numel() // spec.sources
    names = tuple(f"v{i}" for i in range(spec.sources))
    # a place for every source; those that nobody asked for are not written
    gradients = tuple(torch.empty_like(v) if n in needs else v for n, v in zip(names, sources, strict=True))
    wanted = sum(1 << i for i, n in enumerate(names) if n in needs)
    query_gradient = "query" in needs
    programs = min(triton.cdiv(rows, config["backward_rows"]), config["backward_programs"])
    group = config["backward_sources"]
    groups = triton.cdiv(spec.sources, group)
    dquery = sources[0].new_empty((groups * programs, hidden), dtype=torch.float32) if query_gradient else None
    # a launch unrolls its sources: a few launches, each reading dh and h again, compile where one does not in a minute
    for number in range(groups if rows > 0 and hidden > 0 else 0):
        part = slice(number * group, (number + 1) * group)
        backward_kernel[(programs,)](
            grads["h"], saved["h"], sources[part], tensors["query"], saved["score"], saved["rstd"], gradients[part],
            dquery[number * programs :] if query_gradient else None,
            number * group, spec.sources, rows, hidden,
            SOURCES=len(sources[part]), SCALE=spec.scale, WANTED=(wanted >> (number * group)) & ((1 << group) - 1),
            QUERY_GRADIENT=query_gradient, ROWS=config["backward_rows"], BLOCK_D=triton.next_power_of_2(hidden),
            L=triton.next_power_of_2(spec.sources), num_warps=config["backward_warps"],
        )  # fmt: skip
    found = {n: g for n, g in zip(names, gradients, strict=True) if n in needs}
    if query_gradient:
        found["query"] = dquery.sum(0).to(tensors["query"].dtype)
    return found
