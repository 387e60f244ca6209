# honest: a loop over blocks of columns, twice; no tile holds a whole row


@triton.jit
def _blocked(x_ptr, weight_ptr, gate_ptr, y_ptr, rstd_ptr, N, D, ROWS: tl.constexpr, STEP: tl.constexpr):
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total_R = tl.zeros((ROWS,), tl.float32)
    for start in range(0, D, STEP):
        col_C = start + tl.arange(0, STEP)
        inside_RC = (row_R < N)[:, None] & (col_C < D)[None, :]
        x_RC = tl.load(x_ptr + row_R[:, None] * D + col_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        total_R += tl.sum(x_RC * x_RC, axis=1)
    rstd_R = tl.rsqrt(total_R / D + 1e-06)
    tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)
    for start in range(0, D, STEP):
        col_C = start + tl.arange(0, STEP)
        at_RC = row_R[:, None] * D + col_C[None, :]
        inside_RC = (row_R < N)[:, None] & (col_C < D)[None, :]
        y_RC = tl.load(x_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32) * rstd_R[:, None]
        y_RC *= (1.0 + tl.load(weight_ptr + col_C, mask=col_C < D, other=0.0).to(tl.float32))[None, :]
        y_RC *= tl.sigmoid(tl.load(gate_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32))
        tl.store(y_ptr + at_RC, y_RC.to(y_ptr.dtype.element_ty), mask=inside_RC)


def forward(tensors, config):
    x = tensors["x"]
    outputs, saved = outputs_like(tensors, config)
    rows, hidden = saved["rstd"].numel(), x.shape[-1]
    if rows > 0 and hidden > 0:
        _blocked[(-(-rows // 128),)](
            x, tensors["weight"], tensors["gate"], outputs["y"], saved["rstd"], rows, hidden,
            ROWS=128, STEP=512, num_warps=1,
        )  # fmt: skip
    return outputs, saved
