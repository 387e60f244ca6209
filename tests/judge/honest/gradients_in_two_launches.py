# honest: the gradient of each input by a launch of its own

_backward_all = backward


def backward(tensors, saved, grads, needs, config):
    gradients = {}
    for name in ("x", "weight", "gate"):
        if name in needs:
            gradients[name] = _backward_all(tensors, saved, grads, frozenset({name}), config)[name]
    return gradients
