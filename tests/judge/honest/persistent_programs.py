# honest: three programs that walk over all tiles


@triton.jit
def _walk(x_ptr, weight_ptr, gate_ptr, y_ptr, rstd_ptr, N, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    col_D = tl.arange(0, BLOCK_D)
    scale_D = 1.0 + tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at_RD = row_R[:, None] * D + col_D[None, :]
        inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]
        h_RD = tl.load(x_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        rstd_R = tl.rsqrt(tl.sum(h_RD * h_RD, axis=1) / D + 1e-06)
        tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)
        gate_RD = tl.load(gate_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        y_RD = h_RD * rstd_R[:, None] * scale_D[None, :] * tl.sigmoid(gate_RD)
        tl.store(y_ptr + at_RD, y_RD.to(y_ptr.dtype.element_ty), mask=inside_RD)


def forward(tensors, config):
    x = tensors["x"]
    outputs, saved = outputs_like(tensors, config)
    rows, hidden = saved["rstd"].numel(), x.shape[-1]
    if rows > 0 and hidden > 0:
        _walk[(3,)](
            x, tensors["weight"], tensors["gate"], outputs["y"], saved["rstd"], rows, hidden,
            ROWS=config["forward_rows"], BLOCK_D=1 << (hidden - 1).bit_length(), num_warps=1,
        )  # fmt: skip
    return outputs, saved
