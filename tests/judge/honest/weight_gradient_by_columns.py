# honest: the weight's gradient has a kernel of its own: one program a block of columns, all rows one after the other

_backward_without = backward


@triton.jit
def _by_columns(dy_ptr, x_ptr, gate_ptr, rstd_ptr, dweight_ptr, N, D, ROWS: tl.constexpr, STEP: tl.constexpr):
    col_C = tl.program_id(0) * STEP + tl.arange(0, STEP)
    total_C = tl.zeros((STEP,), tl.float32)
    for start in range(0, N, ROWS):
        row_R = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        at_RC = row_R[:, None] * D + col_C[None, :]
        inside_RC = (row_R < N)[:, None] & (col_C < D)[None, :]
        part_RC = tl.load(dy_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        part_RC *= tl.sigmoid(tl.load(gate_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32))
        part_RC *= tl.load(x_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        total_C += tl.sum(part_RC * tl.load(rstd_ptr + row_R, mask=row_R < N, other=0.0)[:, None], axis=0)
    tl.store(dweight_ptr + col_C, total_C.to(dweight_ptr.dtype.element_ty), mask=col_C < D)


def backward(tensors, saved, grads, needs, config):
    gradients = _backward_without(tensors, saved, grads, needs - {"weight"}, config)
    if "weight" in needs:
        x, rows, hidden = tensors["x"], saved["rstd"].numel(), tensors["x"].shape[-1]
        dweight = torch.zeros_like(tensors["weight"])
        dy = x.new_zeros(x.shape) if grads["y"] is None else grads["y"]
        if rows > 0 and hidden > 0:
            _by_columns[(-(-hidden // 256),)](
                dy, x, tensors["gate"], saved["rstd"], dweight, rows, hidden, ROWS=256, STEP=256, num_warps=1
            )
        gradients["weight"] = dweight
    return gradients
