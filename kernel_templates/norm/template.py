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
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    col_D = tl.arange(0, BLOCK_D)
    if WEIGHTED:
        scale_D = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
        if OFFSET:
            scale_D += 1.0
    dweight_D = tl.zeros((BLOCK_D,), tl.float32)
    dbias_D = tl.zeros((BLOCK_D,), tl.float32)

    for tile in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at_RD = row_R[:, None] * D + col_D[None, :]
        inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]
        rstd_R = tl.load(rstd_ptr + row_R, mask=row_R < N, other=0.0)
        unit_RD = tl.load(h_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        if CENTRED:
            unit_RD = tl.where(inside_RD, unit_RD - (tl.sum(unit_RD, axis=1) / D)[:, None], 0.0)
        unit_RD *= rstd_R[:, None]
        dunit_RD = tl.load(dy_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)

        if GATE != "none":
            gate_RD = tl.load(gate_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
            sigmoid_RD = tl.sigmoid(gate_RD)
            if GATE == "silu":
                act_RD = gate_RD * sigmoid_RD
                slope_RD = sigmoid_RD + act_RD * (1.0 - sigmoid_RD)
            else:
                act_RD = sigmoid_RD
                slope_RD = sigmoid_RD * (1.0 - sigmoid_RD)
            dgate_RD = dunit_RD * unit_RD * slope_RD
            if WEIGHTED:
                dgate_RD *= scale_D[None, :]
            tl.store(dgate_ptr + at_RD, dgate_RD.to(dgate_ptr.dtype.element_ty), mask=inside_RD)
            dunit_RD *= act_RD
        if BIAS_GRADIENT:
            dbias_D += tl.sum(dunit_RD, axis=0)
        if WEIGHT_GRADIENT:
            dweight_D += tl.sum(dunit_RD * unit_RD, axis=0)
        if WEIGHTED:
            dunit_RD *= scale_D[None, :]

        # d(h rstd)/dh: the part of the gradient along the unit row is projected out
        along_R = tl.sum(dunit_RD * unit_RD, axis=1) / D
        dh_RD = (dunit_RD - unit_RD * along_R[:, None]) * rstd_R[:, None]
        if CENTRED:  # and so is the part that is the same in every column
            dh_RD -= (tl.sum(dunit_RD, axis=1) / D * rstd_R)[:, None]
        if RESIDUAL_GRADIENT:
            dh_RD += tl.load(d_residual_out_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        tl.store(dh_ptr + at_RD, dh_RD.to(dh_ptr.dtype.element_ty), mask=inside_RD)

    if WEIGHT_GRADIENT:
        tl.store(dweight_ptr + program.to(tl.int64) * D + col_D, dweight_D, mask=col_D < D)
    if BIAS_GRADIENT:
        tl.store(dbias_ptr + program.to(tl.int64) * D + col_D, dbias_D, mask=col_D < D)


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
    """Configurations depend on the hidden size only."""
    return {"hidden": tensors["x"].shape[-1]}


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
            ROWS=config["backward_rows"],
            BLOCK_D=1 << (hidden - 1).bit_length(),
            num_warps=config["backward_warps"],
        )
    gradients = {}
    if "x" in needs:
        gradients["x"] = dh.to(tensors["x"].dtype)
    if weight_gradient:
        gradients["weight"] = dweight.sum(0).to(tensors["weight"].dtype)
    if bias_gradient:
        gradients["bias"] = dbias.sum(0).to(tensors["bias"].dtype)
    if spec.gate != "none" and "gate" in needs:
        gradients["gate"] = dgate
    if spec.residual and "residual" in needs:
        gradients["residual"] = dh
    return gradients
