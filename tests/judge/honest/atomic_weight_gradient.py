# honest: the weight's gradient is added up with atomics, and says so
DETERMINISM = "atomic"


@triton.jit
def _add_up(partial_ptr, sum_ptr, D, BLOCK_D: tl.constexpr):
    col_D = tl.arange(0, BLOCK_D)
    part_D = tl.load(partial_ptr + tl.program_id(0) * D + col_D, mask=col_D < D, other=0.0)
    tl.atomic_add(sum_ptr + col_D, part_D, mask=col_D < D)


_backward_without = backward


def backward(tensors, saved, grads, needs, config):
    gradients = _backward_without(tensors, saved, grads, needs - {"weight"}, config)
    h, rows, hidden = tensors["x"], saved["rstd"].numel(), tensors["x"].shape[-1]
    if "weight" in needs:
        total = h.new_zeros((hidden,), dtype=torch.float32)
        if rows > 0 and hidden > 0:
            partial = h.new_empty((2, hidden), dtype=torch.float32)
            block, first = 1 << (hidden - 1).bit_length(), 1 << (hidden.bit_length() - 1)
            dy = grads["y"]
            _backward_kernel[(2,)](
                h.new_zeros(h.shape) if dy is None else dy, h, tensors["weight"], tensors["gate"], saved["rstd"],
                torch.empty_like(h), torch.empty_like(h), partial, rows, hidden,
                WEIGHT_GRADIENT=True, STAGES=1, ROWS=config["backward_rows"], BLOCK_D=first, BLOCK_E=block - first,
                num_warps=1,
            )  # fmt: skip
            _add_up[(2,)](partial, total, hidden, BLOCK_D=block, num_warps=1)
        gradients["weight"] = total.to(tensors["weight"].dtype)
    return gradients
