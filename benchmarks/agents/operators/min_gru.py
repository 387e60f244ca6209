"""The minimal gated recurrent unit: a gate and a candidate that do not depend on the state.
Feng et al., "Were RNNs All We Needed?" (2024), with the positive candidate of its log-space form."""

import torch

SIGNATURE = {
    "dims": {"B": 2, "T": 2048, "C": 1024},
    "inputs": {"z": ["B", "T", "C"], "h": ["B", "T", "C"]},
    "outputs": {"y": ["B", "T", "C"]},
}


def reference(z, h):
    gate = torch.sigmoid(z)
    candidate = torch.where(h >= 0, h + 0.5, torch.sigmoid(h))
    state, out = torch.zeros_like(h[:, 0]) if h.shape[1] else None, []
    for t in range(h.shape[1]):
        state = (1 - gate[:, t]) * state + gate[:, t] * candidate[:, t]
        out.append(state)
    return torch.stack(out, 1) if out else h * 0
