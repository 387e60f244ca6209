# honest: keeps a second tensor for backward that it never needs

_outputs_like = outputs_like
_forward_plain = forward


def outputs_like(tensors, config):
    outputs, saved = _outputs_like(tensors, config)
    saved["kept"] = tensors["x"].new_empty((3,), dtype=torch.float32)
    return outputs, saved


def forward(tensors, config):
    outputs, saved = _forward_plain(tensors, config)
    saved["kept"].fill_(0.0)
    return outputs, saved
