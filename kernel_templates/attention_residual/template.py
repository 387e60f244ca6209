"""Attention residuals, forward and backward: a softmax over L sources for each token, each source read once each way.

Tensors are rows [N, D] (leading dims flattened), the sources a tuple of L of them. A program holds one row; a row of a
source stays in registers from its score to its use, so forward needs no second pass: the running average is rescaled
when a larger score comes. Backward needs <dh, h> before any gradient: taken from the stored output, so one pass is
enough there too. It walks rows with a fixed stride and keeps the query's gradient of all of them in registers: one
partial sum a program, added up afterwards, so two runs are bitwise equal.

One row a program, so that what belongs to a row is a scalar: a vector of rows has another layout than their tile, and
Triton 3.6 spreads it over the tile before it converts it, through shared memory, for a minute of compilation.

Legend: N rows, D hidden size, L sources; suffix _D is a row [BLOCK_D], _L one value a source.
"""

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 1 << 20  # most elements that a Triton tile may have


@triton.jit
def forward_kernel(
    sources, query_ptr, h_ptr, score_ptr, rstd_ptr, D,
    SOURCES: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col_D = tl.arange(0, BLOCK_D)
    query_D = tl.load(query_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    h_D = tl.zeros((BLOCK_D,), tl.float32)
    most = -float("inf")
    total = 0.0
    for i in tl.static_range(SOURCES):
        v_D = tl.load(sources[i] + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(v_D * v_D, axis=0) / D + EPS)
        score = SCALE * rstd * tl.sum(v_D * query_D, axis=0)
        tl.store(score_ptr + row * SOURCES + i, score)
        tl.store(rstd_ptr + row * SOURCES + i, rstd)
        now = tl.maximum(most, score)
        kept = tl.exp(most - now)
        weight = tl.exp(score - now)
        h_D = h_D * kept + v_D * weight
        total = total * kept + weight
        most = now
    tl.store(h_ptr + row * D + col_D, (h_D / total).to(h_ptr.dtype.element_ty), mask=col_D < D)


@triton.jit(do_not_specialize=["first"])
def backward_kernel(
    dh_ptr, h_ptr, sources, query_ptr, score_ptr, rstd_ptr, gradients, dquery_ptr, first, N, D,
    SOURCES: tl.constexpr, ALL: tl.constexpr, SCALE: tl.constexpr, WANTED: tl.constexpr,
    QUERY_GRADIENT: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Gradients of SOURCES sources from number ``first`` on, of ALL that share in the softmax."""
    program = tl.program_id(0)
    col_D = tl.arange(0, BLOCK_D)
    at_L = tl.arange(0, L)
    query_D = tl.load(query_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    dquery_D = tl.zeros((BLOCK_D,), tl.float32)
    for number in tl.range(program, N, tl.num_programs(0), num_stages=1):
        row = tl.cast(number, tl.int64)
        dh_D = tl.load(dh_ptr + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        h_D = tl.load(h_ptr + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        along = tl.sum(dh_D * h_D, axis=0)
        score_L = tl.load(score_ptr + row * ALL + at_L, mask=at_L < ALL, other=-float("inf"))
        most = tl.max(score_L, axis=0)
        total = tl.sum(tl.exp(score_L - most), axis=0)
        for i in tl.static_range(SOURCES):
            v_D = tl.load(sources[i] + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
            score = tl.load(score_ptr + row * ALL + first + i)
            rstd = tl.load(rstd_ptr + row * ALL + first + i)
            weight = tl.exp(score - most) / total
            dscore = weight * (tl.sum(dh_D * v_D, axis=0) - along)
            toward = SCALE * dscore * rstd
            if QUERY_GRADIENT:
                dquery_D += v_D * toward
            if (WANTED >> i) & 1:
                dv_D = dh_D * weight + query_D * toward - v_D * (dscore * score * rstd * rstd / D)
                tl.store(gradients[i] + row * D + col_D, dv_D.to(gradients[i].dtype.element_ty), mask=col_D < D)
    if QUERY_GRADIENT:
        tl.store(dquery_ptr + program.to(tl.int64) * D + col_D, dquery_D, mask=col_D < D)


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
        forward_kernel[(rows,)](
            sources, tensors["query"], outputs["h"], saved["score"], saved["rstd"], hidden,
            SOURCES=spec.sources, EPS=spec.eps, SCALE=spec.scale,
            BLOCK_D=triton.next_power_of_2(hidden), num_warps=config["forward_warps"],
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
    programs = min(rows, config["backward_programs"])
    group = config["backward_sources"]
    groups = triton.cdiv(spec.sources, group)
    dquery = sources[0].new_empty((groups * programs, hidden), dtype=torch.float32) if query_gradient else None
    # a launch unrolls its sources and reads dh and h again
    for number in range(groups if rows > 0 and hidden > 0 else 0):
        part = slice(number * group, (number + 1) * group)
        backward_kernel[(programs,)](
            grads["h"], saved["h"], sources[part], tensors["query"], saved["score"], saved["rstd"], gradients[part],
            dquery[number * programs :] if query_gradient else None,
            number * group, rows, hidden,
            SOURCES=len(sources[part]), ALL=spec.sources, SCALE=spec.scale,
            WANTED=(wanted >> (number * group)) & ((1 << group) - 1), QUERY_GRADIENT=query_gradient,
            BLOCK_D=triton.next_power_of_2(hidden), L=triton.next_power_of_2(spec.sources),
            num_warps=config["backward_warps"],
        )  # fmt: skip
    found = {n: g for n, g in zip(names, gradients, strict=True) if n in needs}
    if query_gradient:
        found["query"] = dquery.sum(0).to(tensors["query"].dtype)
    return found
