"""The multi-dimensional damped moving average of Mega, as a recurrence.
Ma et al., "Mega" (2022), equation 7."""

import torch

SIGNATURE = {
    "dims": {"B": 2, "T": 1024, "C": 256, "N": {"full": 16, "choices": [2, 4, 16]}},
    "inputs": {
        "x": ["B", "T", "C"],
        "alpha": ["C", "N"],
        "delta": ["C", "N"],
        "beta": ["C", "N"],
        "eta": {"shape": ["C", "N"], "values": {"spread": 0.3}},
    },
    "outputs": {"y": ["B", "T", "C"]},
}


def reference(x, alpha, delta, beta, eta):
    rise, damp = torch.sigmoid(alpha), torch.sigmoid(delta)
    keep = 1 - rise * damp
    state = x.new_zeros(x.shape[0], *alpha.shape)
    out = []
    for t in range(x.shape[1]):
        state = keep * state + rise * beta * x[:, t, :, None]
        out.append((state * eta).sum(-1))
    return torch.stack(out, 1) if out else x * 0
