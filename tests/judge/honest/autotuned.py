# honest: decorated with triton's autotuner, which has one choice


@triton.autotune(configs=[triton.Config({}, num_warps=4, num_stages=2)], key=["D"])
@triton.jit
def _forward_kernel(x_ptr, weight_ptr, gate_ptr, y_ptr, rstd_ptr, N, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, BLOCK_D)
    at_RD = row_R[:, None] * D + col_D[None, :]
    inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]
    h_RD = tl.load(x_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
    rstd_R = tl.rsqrt(tl.sum(h_RD * h_RD, axis=1) / D + 1e-06)
    tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)
    scale_D = 1.0 + tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    gate_RD = tl.load(gate_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
    y_RD = h_RD * rstd_R[:, None] * scale_D[None, :] * tl.sigmoid(gate_RD)
    tl.store(y_ptr + at_RD, y_RD.to(y_ptr.dtype.element_ty), mask=inside_RD)


def forward(tensors, config):
    x = tensors["x"]
    outputs, saved = outputs_like(tensors, config)
    rows, hidden, tile = saved["rstd"].numel(), x.shape[-1], config["forward_rows"]
    if rows > 0 and hidden > 0:
        _forward_kernel[(-(-rows // tile),)](
            x, tensors["weight"], tensors["gate"], outputs["y"], saved["rstd"], rows, hidden,
            ROWS=tile, BLOCK_D=1 << (hidden - 1).bit_length(),
        )  # fmt: skip
    return outputs, saved
