# honest: the kernel writes fp32, the host converts

_outputs_like = outputs_like
_forward_plain = forward


def forward(tensors, config):
    wide = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    outputs, saved = _forward_plain(wide, config)
    return {"y": outputs["y"].to(tensors["x"].dtype)}, saved
