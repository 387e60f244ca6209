# honest: partial sums lie as [hidden, programs] and are added along the last dim

_backward_without = backward


@triton.jit
def _transpose(source_ptr, target_ptr, P, D, BLOCK_D: tl.constexpr):
    col_D = tl.arange(0, BLOCK_D)
    value_D = tl.load(source_ptr + tl.program_id(0) * D + col_D, mask=col_D < D, other=0.0)
    tl.store(target_ptr + col_D * P + tl.program_id(0), value_D, mask=col_D < D)


def backward(tensors, saved, grads, needs, config):
    gradients = _backward_without(tensors, saved, grads, needs - {"weight"}, config)
    h, rows, hidden = tensors["x"], saved["rstd"].numel(), tensors["x"].shape[-1]
    if "weight" in needs:
        turned = h.new_zeros((hidden, 2), dtype=torch.float32)
        if rows > 0 and hidden > 0:
            partial, block = h.new_empty((2, hidden), dtype=torch.float32), 1 << (hidden - 1).bit_length()
            first = 1 << (hidden.bit_length() - 1)
            _backward_kernel[(2,)](
                h.new_zeros(h.shape) if grads["y"] is None else grads["y"], h, tensors["weight"], tensors["gate"],
                saved["rstd"], torch.empty_like(h), torch.empty_like(h), partial, rows, hidden,
                WEIGHT_GRADIENT=True, STAGES=1, ROWS=config["backward_rows"], BLOCK_D=first, BLOCK_E=block - first,
                num_warps=1,
            )  # fmt: skip
            _transpose[(2,)](partial, turned, 2, hidden, BLOCK_D=block, num_warps=1)
        gradients["weight"] = turned.sum(-1).to(tensors["weight"].dtype)
    return gradients
