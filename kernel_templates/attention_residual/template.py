"""Attention residuals, forward and backward: a softmax over L sources for each token.

Tensors are rows [N, D] (leading dims flattened), the sources a tuple of L of them. A program takes one row of every
source twice: first for its score (backward: for <dh, v>), all reads of a group of sources being under way before the
first sum, since a sum's barriers let no later read start early; then for its use, when it still lies in the first-level
cache.
Backward walks rows with a fixed stride and keeps the query's gradient of all of them in registers: one partial sum a
program, added up afterwards, so two runs are bitwise equal.

One row a program, so that what belongs to a row is a scalar: a vector of rows has another layout than their tile, and
Triton 3.6 spreads it over the tile before it converts it, through shared memory, for a minute of compilation.

Legend: N rows, D hidden size, L sources; suffix _D is a row [BLOCK_D].
"""

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 1 << 20  # most elements that a Triton tile may have


@triton.jit
def two_sums(a_D, b_D):
    """Sums of two rows at once: what one costs in barriers."""
    return tl.split(tl.sum(tl.join(a_D, b_D), axis=0))


@triton.jit
def forward_kernel(
    sources, query_ptr, h_ptr, score_ptr, rstd_ptr, D,
    SOURCES: tl.constexpr, GROUP: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col_D = tl.arange(0, BLOCK_D)
    query_D = tl.load(query_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    scores = ()
    most = tl.full((), -float("inf"), tl.float32)
    for start in tl.static_range(0, SOURCES, GROUP):
        held = ()
        for i in tl.static_range(start, min(start + GROUP, SOURCES)):
            held = held + (tl.load(sources[i] + row * D + col_D, mask=col_D < D, other=0.0),)
        for i in tl.static_range(start, min(start + GROUP, SOURCES)):
            v_D = held[i - start].to(tl.float32)
            squares, along = two_sums(v_D * v_D, v_D * query_D)
            rstd = tl.rsqrt(squares / D + EPS)
            score = SCALE * rstd * along
            tl.store(score_ptr + row * SOURCES + i, score)
            tl.store(rstd_ptr + row * SOURCES + i, rstd)
            scores = scores + (score,)
            most = tl.maximum(most, score)
    total = tl.full((), 0.0, tl.float32)
    h_D = tl.zeros((BLOCK_D,), tl.float32)
    for i in tl.static_range(SOURCES):
        weight = tl.exp(scores[i] - most)
        total += weight
        h_D += weight * tl.load(sources[i] + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    tl.store(h_ptr + row * D + col_D, (h_D / total).to(h_ptr.dtype.element_ty), mask=col_D < D)


@triton.jit
def backward_kernel(
    dh_ptr, sources, query_ptr, score_ptr, rstd_ptr, gradients, dquery_ptr, N, D,
    SOURCES: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, WANTED: tl.constexpr,
    QUERY_GRADIENT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col_D = tl.arange(0, BLOCK_D)
    dquery_D = tl.zeros((BLOCK_D,), tl.float32)
    for number in tl.range(program, N, tl.num_programs(0), num_stages=1):
        row = tl.cast(number, tl.int64)
        dh_D = tl.load(dh_ptr + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        most = tl.load(score_ptr + row * SOURCES)
        for i in tl.static_range(1, SOURCES):
            most = tl.maximum(most, tl.load(score_ptr + row * SOURCES + i))
        shares = ()
        total = tl.full((), 0.0, tl.float32)
        along = tl.full((), 0.0, tl.float32)  # <dh, h> total
        for start in tl.static_range(0, SOURCES, GROUP):
            held = ()
            for i in tl.static_range(start, min(start + GROUP, SOURCES)):
                held = held + (tl.load(sources[i] + row * D + col_D, mask=col_D < D, other=0.0),)
            for i in tl.static_range(start, min(start + GROUP, SOURCES)):
                weight = tl.exp(tl.load(score_ptr + row * SOURCES + i) - most)
                share = tl.sum(dh_D * held[i - start].to(tl.float32), axis=0)
                total += weight
                along += weight * share
                shares = shares + (share,)
        # the compiler would keep all rows in registers rather than read them again
        tl.debug_barrier()
        query_D = tl.load(query_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        dh_D = tl.load(dh_ptr + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        for i in tl.static_range(SOURCES):
            score = tl.load(score_ptr + row * SOURCES + i)
            weight = tl.exp(score - most) / total
            rstd = tl.load(rstd_ptr + row * SOURCES + i)
            dscore = weight * (shares[i] - along / total)
            toward = SCALE * dscore * rstd
            v_D = tl.load(sources[i] + row * D + col_D, mask=col_D < D, other=0.0).to(tl.float32)
            if QUERY_GRADIENT:
                dquery_D += v_D * toward
            if (WANTED >> i) & 1:
                dv_D = dh_D * weight + query_D * toward - v_D * (dscore * score * rstd * rstd / D)
                tl.store(gradients[i] + row * D + col_D, dv_D.to(gradients[i].dtype.element_ty), mask=col_D < D)
    if QUERY_GRADIENT:
        tl.store(dquery_ptr + program.to(tl.int64) * D + col_D, dquery_D, mask=col_D < D)


def bucket(tensors, spec):
    """Configurations depend on the hidden size only."""
    return {"hidden": tensors["v0"].shape[-1]}


def outputs_like(tensors, spec, config):
    """Empty h [..., D]; saved: scores and rsqrt of mean squares [..., L] fp32."""
    v = tensors["v0"]
    h = torch.empty_like(v)
    score = v.new_empty((*v.shape[:-1], spec.sources), dtype=torch.float32)
    return {"h": h}, {"score": score, "rstd": torch.empty_like(score)}


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
            SOURCES=spec.sources, GROUP=config["forward_sources"], EPS=spec.eps, SCALE=spec.scale,
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
    dquery = sources[0].new_empty((programs, hidden), dtype=torch.float32) if query_gradient else None
    if rows > 0 and hidden > 0:
        backward_kernel[(programs,)](
            grads["h"], sources, tensors["query"], saved["score"], saved["rstd"], gradients, dquery, rows, hidden,
            SOURCES=spec.sources, GROUP=config["backward_sources"], SCALE=spec.scale, WANTED=wanted,
            QUERY_GRADIENT=query_gradient, BLOCK_D=triton.next_power_of_2(hidden), num_warps=config["backward_warps"],
        )  # fmt: skip
    found = {n: g for n, g in zip(names, gradients, strict=True) if n in needs}
    if query_gradient:
        found["query"] = dquery.sum(0).to(tensors["query"].dtype)
    return found
