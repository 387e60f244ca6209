# honest: backward computes the statistics again; what was saved is not looked at

_backward_with = backward


@triton.jit
def _again(x_ptr, rstd_ptr, N, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, BLOCK_D)
    inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]
    h_RD = tl.load(x_ptr + row_R[:, None] * D + col_D[None, :], mask=inside_RD, other=0.0).to(tl.float32)
    tl.store(rstd_ptr + row_R, tl.rsqrt(tl.sum(h_RD * h_RD, axis=1) / D + 1e-06), mask=row_R < N)


def backward(tensors, saved, grads, needs, config):
    x = tensors["x"]
    rstd = torch.empty_like(saved["rstd"])
    rows, hidden = rstd.numel(), x.shape[-1]
    if rows > 0 and hidden > 0:
        _again[(-(-rows // 64),)](x, rstd, rows, hidden, ROWS=64, BLOCK_D=1 << (hidden - 1).bit_length(), num_warps=1)
    return _backward_with(tensors, {"rstd": rstd}, grads, needs, config)
