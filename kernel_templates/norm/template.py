"""RMSNorm or LayerNorm over the last dim, forward and backward: plain, offset, gated, with a fused residual add.

Tensors are rows [N, D] (leading dims flattened). One program handles a tile of whole rows, so every element is read
once; all arithmetic is fp32. Backward walks its tiles with a fixed stride and keeps the weight gradient of all of
them in registers: one partial sum a program, added up afterwards, so two runs are bitwise equal.

Legend: N rows, D hidden size; suffix _RD is a tile [ROWS, BLOCK_D], _R one value a row, _D one a column.
"""

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 1 << 20  # most elements that a Triton tile may have
TOTAL = 4096  # elements of the tiles in which programs' shares are added up


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    residual_ptr,
    y_ptr,
    residual_out_ptr,
    rstd_ptr,
    N,
    D,
    EPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, BLOCK_D)
    at_RD = row_R[:, None] * D + col_D[None, :]
    inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]

    h_RD = tl.load(x_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if RESIDUAL:
        h_RD += tl.load(residual_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        # what is normalised is what is stored: backward reads it again
        stored_RD = h_RD.to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + at_RD, stored_RD, mask=inside_RD)
        h_RD = stored_RD.to(tl.float32)
    if CENTRED:
        h_RD = tl.where(inside_RD, h_RD - (tl.sum(h_RD, axis=1) / D)[:, None], 0.0)
    rstd_R = tl.rsqrt(tl.sum(h_RD * h_RD, axis=1) / D + EPS)
    tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)

    y_RD = h_RD * rstd_R[:, None]
    if WEIGHTED:
        scale_D = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        if OFFSET:
            scale_D += 1.0
        y_RD *= scale_D[None, :]
    if BIAS:
        y_RD += tl.load(bias_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)[None, :]
    if GATE != "none":
        gate_RD = tl.load(gate_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        y_RD *= tl.sigmoid(gate_RD)
        if GATE == "silu":
            y_RD *= gate_RD
    tl.store(y_ptr + at_RD, y_RD.to(y_ptr.dtype.element_ty), mask=inside_RD)


@triton.jit
def _loaded(ptr, at_RD, inside_RD):
    """A tile in fp32; zeros outside."""
    return tl.load(ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)


@triton.jit
def _scale(weight_ptr, col_D, D, OFFSET: tl.constexpr):
    """The scale of columns, fp32; zeros outside."""
    scale_D = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    if OFFSET:
        scale_D += 1.0
    return scale_D


@triton.jit
def _through_gate(
    dy_RD, unit_RD, scale_D, gate_ptr, dgate_ptr, at_RD, inside_RD, WEIGHTED: tl.constexpr, GATE: tl.constexpr
):
    """Stores the gradient of the gate; returns the gradient of what the gate multiplied."""
    gate_RD = _loaded(gate_ptr, at_RD, inside_RD)
    sigmoid_RD = tl.sigmoid(gate_RD)
    if GATE == "silu":
        act_RD = gate_RD * sigmoid_RD
        slope_RD = sigmoid_RD + act_RD * (1.0 - sigmoid_RD)
    else:
        act_RD = sigmoid_RD
        slope_RD = sigmoid_RD * (1.0 - sigmoid_RD)
    dgate_RD = dy_RD * unit_RD * slope_RD
    if WEIGHTED:
        dgate_RD *= scale_D[None, :]
    tl.store(dgate_ptr + at_RD, dgate_RD.to(dgate_ptr.dtype.element_ty), mask=inside_RD)
    return dy_RD * act_RD


@triton.jit
def _store_dh(
    dunit_RD, unit_RD, along_R, same_R, rstd_R, d_residual_out_ptr, dh_ptr, at_RD, inside_RD,
    CENTRED: tl.constexpr, RESIDUAL_GRADIENT: tl.constexpr,
):  # fmt: skip
    """d(h rstd)/dh: the part of the gradient along the unit row is projected out, and in LayerNorm its mean."""
    dh_RD = (dunit_RD - unit_RD * along_R[:, None]) * rstd_R[:, None]
    if CENTRED:
        dh_RD -= (same_R * rstd_R)[:, None]
    if RESIDUAL_GRADIENT:
        dh_RD += _loaded(d_residual_out_ptr, at_RD, inside_RD)
    tl.store(dh_ptr + at_RD, dh_RD.to(dh_ptr.dtype.element_ty), mask=inside_RD)


@triton.jit
def _backward_kernel(
    dy_ptr,
    d_residual_out_ptr,
    h_ptr,
    weight_ptr,
    gate_ptr,
    rstd_ptr,
    dh_ptr,
    dgate_ptr,
    dweight_ptr,
    dbias_ptr,
    N,
    D,
    WEIGHTED: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL_GRADIENT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A row is cut in two: its first BLOCK_D columns, all real, and BLOCK_E that hold the rest (suffix _E), if any."""
    program = tl.program_id(0)
    col_D = tl.arange(0, BLOCK_D)
    scale_D = 0.0
    scale_E = 0.0
    if WEIGHTED:
        scale_D = _scale(weight_ptr, col_D, D, OFFSET)
    dweight_D = tl.zeros((BLOCK_D,), tl.float32)
    dbias_D = tl.zeros((BLOCK_D,), tl.float32)
    if BLOCK_E > 0:
        col_E = BLOCK_D + tl.arange(0, BLOCK_E)
        if WEIGHTED:
            scale_E = _scale(weight_ptr, col_E, D, OFFSET)
        dweight_E = tl.zeros((BLOCK_E,), tl.float32)
        dbias_E = tl.zeros((BLOCK_E,), tl.float32)

    for tile in tl.range(program, tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at_RD = row_R[:, None] * D + col_D[None, :]
        inside_RD = tl.broadcast_to((row_R < N)[:, None], (ROWS, BLOCK_D))
        rstd_R = tl.load(rstd_ptr + row_R, mask=row_R < N, other=0.0)
        unit_RD = _loaded(h_ptr, at_RD, inside_RD)
        dunit_RD = _loaded(dy_ptr, at_RD, inside_RD)
        if BLOCK_E > 0:
            at_RE = row_R[:, None] * D + col_E[None, :]
            inside_RE = (row_R < N)[:, None] & (col_E < D)[None, :]
            unit_RE = _loaded(h_ptr, at_RE, inside_RE)
            dunit_RE = _loaded(dy_ptr, at_RE, inside_RE)
        if CENTRED:
            mean_R = tl.sum(unit_RD, axis=1)
            if BLOCK_E > 0:
                mean_R += tl.sum(unit_RE, axis=1)
                unit_RE = tl.where(inside_RE, unit_RE - (mean_R / D)[:, None], 0.0)
            unit_RD = tl.where(inside_RD, unit_RD - (mean_R / D)[:, None], 0.0)
        unit_RD *= rstd_R[:, None]
        if BLOCK_E > 0:
            unit_RE *= rstd_R[:, None]
        if GATE != "none":
            dunit_RD = _through_gate(
                dunit_RD, unit_RD, scale_D, gate_ptr, dgate_ptr, at_RD, inside_RD, WEIGHTED, GATE
            )  # fmt: skip
            if BLOCK_E > 0:
                dunit_RE = _through_gate(
                    dunit_RE, unit_RE, scale_E, gate_ptr, dgate_ptr, at_RE, inside_RE, WEIGHTED, GATE
                )  # fmt: skip
        if BIAS_GRADIENT:
            dbias_D += tl.sum(dunit_RD, axis=0)
            if BLOCK_E > 0:
                dbias_E += tl.sum(dunit_RE, axis=0)
        if WEIGHT_GRADIENT:
            dweight_D += tl.sum(dunit_RD * unit_RD, axis=0)
            if BLOCK_E > 0:
                dweight_E += tl.sum(dunit_RE * unit_RE, axis=0)
        if WEIGHTED:
            dunit_RD *= scale_D[None, :]
            if BLOCK_E > 0:
                dunit_RE *= scale_E[None, :]

        along_R = tl.sum(dunit_RD * unit_RD, axis=1)
        same_R = along_R
        if CENTRED:
            same_R = tl.sum(dunit_RD, axis=1)
        if BLOCK_E > 0:
            along_R += tl.sum(dunit_RE * unit_RE, axis=1)
            if CENTRED:
                same_R += tl.sum(dunit_RE, axis=1)
            _store_dh(
                dunit_RE, unit_RE, along_R / D, same_R / D, rstd_R, d_residual_out_ptr, dh_ptr, at_RE, inside_RE,
                CENTRED, RESIDUAL_GRADIENT,
            )  # fmt: skip
        _store_dh(
            dunit_RD, unit_RD, along_R / D, same_R / D, rstd_R, d_residual_out_ptr, dh_ptr, at_RD, inside_RD,
            CENTRED, RESIDUAL_GRADIENT,
        )  # fmt: skip

    base = program.to(tl.int64) * D
    if WEIGHT_GRADIENT:
        tl.store(dweight_ptr + base + col_D, dweight_D)
        if BLOCK_E > 0:
            tl.store(dweight_ptr + base + col_E, dweight_E, mask=col_E < D)
    if BIAS_GRADIENT:
        tl.store(dbias_ptr + base + col_D, dbias_D)
        if BLOCK_E > 0:
            tl.store(dbias_ptr + base + col_E, dbias_E, mask=col_E < D)


@triton.jit
def _totals_kernel(
    dweight_ptr, dbias_ptr, weight_out_ptr, bias_out_ptr, P, D,
    WEIGHT_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sums of P programs' shares [P, D], in a fixed order."""
    col_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_PD = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    also_PD = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, P, BLOCK_P):
        row_P = start + tl.arange(0, BLOCK_P)
        at_PD = row_P[:, None] * D + col_D[None, :]
        inside_PD = (row_P < P)[:, None] & (col_D < D)[None, :]
        if WEIGHT_GRADIENT:
            sum_PD += tl.load(dweight_ptr + at_PD, mask=inside_PD, other=0.0)
        if BIAS_GRADIENT:
            also_PD += tl.load(dbias_ptr + at_PD, mask=inside_PD, other=0.0)
    if WEIGHT_GRADIENT:
        tl.store(weight_out_ptr + col_D, tl.sum(sum_PD, axis=0).to(weight_out_ptr.dtype.element_ty), mask=col_D < D)
    if BIAS_GRADIENT:
        tl.store(bias_out_ptr + col_D, tl.sum(also_PD, axis=0).to(bias_out_ptr.dtype.element_ty), mask=col_D < D)


def traits(spec):
    """With a fused add, backward reads the stored sum instead of its two terms, whose gradients are one tensor."""
    if not spec.residual:
        return {}
    return {
        "shared_gradients": {"residual": "x"},
        "saved_outputs": ("residual_out",),
        "unread_inputs": ("x", "residual"),
    }


def bucket(tensors, spec):
    """Configurations depend on the hidden size, and on whether backward keeps two sums (LayerNorm) in registers."""
    return {"hidden": tensors["x"].shape[-1], "sums": 1 + spec.centred}


def outputs_like(tensors, spec, config):
    """Empty y [..., D] in x's dtype, residual_out [..., D] in residual's; saved: rstd [...] fp32."""
    x = tensors["x"]
    outputs = {"y": torch.empty_like(x)}
    saved = {"rstd": x.new_empty(x.shape[:-1], dtype=torch.float32)}
    if spec.residual:
        outputs["residual_out"] = saved["residual_out"] = torch.empty_like(tensors["residual"])
    return outputs, saved


def forward(tensors, spec, config):
    """The outputs, and what backward needs.

    Raises:
        ValueError: the hidden size exceeds MAX_HIDDEN.
    """
    x = tensors["x"]
    hidden = x.shape[-1]
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden size {hidden} exceeds {MAX_HIDDEN}")
    outputs, saved = outputs_like(tensors, spec, config)
    rows = saved["rstd"].numel()
    if rows > 0 and hidden > 0:
        _forward_kernel[(-(-rows // config["forward_rows"]),)](
            x,
            tensors["weight"] if spec.weighted else None,
            tensors["bias"] if spec.bias else None,
            tensors["gate"] if spec.gate != "none" else None,
            tensors["residual"] if spec.residual else None,
            outputs["y"],
            outputs["residual_out"] if spec.residual else None,
            saved["rstd"],
            rows,
            hidden,
            EPS=spec.eps,
            WEIGHTED=spec.weighted,
            OFFSET=spec.offset,
            CENTRED=spec.centred,
            BIAS=spec.bias,
            GATE=spec.gate,
            RESIDUAL=spec.residual,
            ROWS=config["forward_rows"],
            BLOCK_D=1 << (hidden - 1).bit_length(),
            num_warps=config["forward_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """Gradients of the inputs named in ``needs``; a gradient that did not come in counts as zero."""
    rstd = saved["rstd"]
    h = saved["residual_out"] if spec.residual else tensors["x"]
    hidden = h.shape[-1]
    rows = rstd.numel()
    dy = grads["y"]
    if dy is None:
        dy = h.new_zeros(h.shape)
    d_residual_out = grads["residual_out"] if spec.residual else None
    weight_gradient = spec.weighted and "weight" in needs
    bias_gradient = spec.bias and "bias" in needs
    tiles = -(-rows // config["backward_rows"])
    programs = min(tiles, config["backward_programs"])

    dh = torch.empty_like(h)
    dgate = torch.empty_like(tensors["gate"]) if spec.gate != "none" else None
    dweight = h.new_empty((programs, hidden), dtype=torch.float32) if weight_gradient else None
    dbias = h.new_empty((programs, hidden), dtype=torch.float32) if bias_gradient else None
    if rows > 0 and hidden > 0:
        first = 1 << (hidden.bit_length() - 1)
        _backward_kernel[(programs,)](
            dy,
            d_residual_out,
            h,
            tensors["weight"] if spec.weighted else None,
            tensors["gate"] if spec.gate != "none" else None,
            rstd,
            dh,
            dgate,
            dweight,
            dbias,
            rows,
            hidden,
            WEIGHTED=spec.weighted,
            OFFSET=spec.offset,
            CENTRED=spec.centred,
            GATE=spec.gate,
            RESIDUAL_GRADIENT=d_residual_out is not None,
            WEIGHT_GRADIENT=weight_gradient,
            BIAS_GRADIENT=bias_gradient,
            STAGES=config["backward_stages"],
            ROWS=config["backward_rows"],
            BLOCK_D=first,
            BLOCK_E=0 if hidden == first else 1 << (hidden - first - 1).bit_length(),
            num_warps=config["backward_warps"],
        )
    gradients = {}
    if "x" in needs:
        gradients["x"] = dh.to(tensors["x"].dtype)
    if weight_gradient:
        gradients["weight"] = torch.empty_like(tensors["weight"])
    if bias_gradient:
        gradients["bias"] = torch.empty_like(tensors["bias"])
    if (weight_gradient or bias_gradient) and hidden > 0:
        block = 1 << min(max(programs - 1, 0).bit_length(), 7)
        _totals_kernel[(-(-hidden * block // TOTAL),)](
            dweight,
            dbias,
            gradients["weight"] if weight_gradient else None,
            gradients["bias"] if bias_gradient else None,
            programs,
            hidden,
            WEIGHT_GRADIENT=weight_gradient,
            BIAS_GRADIENT=bias_gradient,
            BLOCK_P=block,
            BLOCK_D=TOTAL // block,
            num_warps=8,
        )
    if spec.gate != "none" and "gate" in needs:
        gradients["gate"] = dgate
    if spec.residual and "residual" in needs:
        gradients["residual"] = dh
    return gradients
