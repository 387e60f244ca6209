# honest: the output is the middle of a larger allocation of its own

_outputs_like = outputs_like


def outputs_like(tensors, config):
    outputs, saved = _outputs_like(tensors, config)
    x = tensors["x"]
    room = x.new_empty((x.numel() + 128,))
    outputs["y"] = room[64 : 64 + x.numel()].view(x.shape)
    return outputs, saved
