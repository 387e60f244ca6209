"""A neural memory of one matrix with momentum and forgetting, trained by a gradient step for each token.
Behrouz et al., "Titans" (2025), equations 9 to 14 with a linear memory; keys of unit norm."""

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 4, "T": 512, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "theta": {"shape": ["B", "H", "T"], "values": {"mean": -1.0}},
        "eta": ["B", "H", "T"],
        "forget": {"shape": ["B", "H", "T"], "values": {"mean": -3.0}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, theta, eta, forget):
    keys = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    rate, push, lose = torch.sigmoid(theta), torch.sigmoid(eta), torch.sigmoid(forget)
    memory = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])
    speed = torch.zeros_like(memory)
    out = []
    for t in range(q.shape[2]):
        key, value = keys[:, :, t], v[:, :, t]
        wrong = (memory * key[..., None, :]).sum(-1) - value
        step = wrong[..., :, None] * key[..., None, :]
        speed = push[:, :, t, None, None] * speed - rate[:, :, t, None, None] * step
        memory = (1 - lose[:, :, t, None, None]) * memory + speed
        out.append((memory * q[:, :, t, None, :]).sum(-1))
    return torch.stack(out, 2) if out else q * 0
