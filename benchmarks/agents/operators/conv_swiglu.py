"""A gated activation after a short causal convolution of the gate, with the input added back.
Convolution before the gate: Liu et al., "Primer"-like blocks; gating: Shazeer, "GLU Variants" (2020)."""

from torch.nn import functional as F

SIGNATURE = {
    "dims": {"B": 2, "T": 2048, "C": 1024},
    "inputs": {
        "gate": ["B", "T", "C"],
        "up": ["B", "T", "C"],
        "taps": {"shape": ["C", 4], "values": {"spread": 0.5}},
        "bias": ["C"],
    },
    "outputs": {"y": ["B", "T", "C"]},
}


def reference(gate, up, taps, bias):
    wide = F.pad(gate, (0, 0, 3, 0))
    mixed = sum(wide[:, tap : tap + gate.shape[1]] * taps[:, tap] for tap in range(4)) + bias
    return F.silu(mixed) * up + gate
