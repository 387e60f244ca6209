# honest: a kernel that does nothing of use runs first; wasteful, and right


@triton.jit
def _warm_up(scratch_ptr):
    tl.store(scratch_ptr + tl.arange(0, 16), tl.arange(0, 16).to(tl.float32))


_forward_plain = forward


def forward(tensors, config):
    _warm_up[(1,)](tensors["x"].new_empty((16,), dtype=torch.float32))
    return _forward_plain(tensors, config)
