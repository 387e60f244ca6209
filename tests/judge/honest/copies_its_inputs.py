# honest: copies every input before it looks at it

_forward_plain = forward
_backward_plain = backward


def forward(tensors, config):
    return _forward_plain({name: tensor.clone() for name, tensor in tensors.items()}, config)


def backward(tensors, saved, grads, needs, config):
    return _backward_plain({name: tensor.clone() for name, tensor in tensors.items()}, saved, grads, needs, config)
