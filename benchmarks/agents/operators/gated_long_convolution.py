"""A causal convolution of each channel with a filter as long as needed, between two gates.
Poli et al., "Hyena Hierarchy" (2023), one order with an explicit filter."""

from torch.nn import functional as F

SIGNATURE = {
    "dims": {"B": 2, "T": 1024, "C": 256, "K": {"full": 128, "choices": [1, 3, 16, 31, 128]}},
    "inputs": {
        "x": ["B", "T", "C"],
        "before": ["B", "T", "C"],
        "after": ["B", "T", "C"],
        "taps": {"shape": ["C", "K"], "values": {"spread": 0.3}},
    },
    "outputs": {"y": ["B", "T", "C"]},
}


def reference(x, before, after, taps):
    width = taps.shape[1]
    wide = F.pad(x * before, (0, 0, width - 1, 0))
    seen = wide.unfold(1, width, 1) if x.shape[1] else wide[:, :0, :, None].expand(-1, -1, -1, width)
    return after * (seen * taps.flip(-1)).sum(-1)
