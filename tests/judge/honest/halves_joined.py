# honest: computes two halves of the rows and joins them with torch.cat

_forward_plain = forward


def forward(tensors, config):
    x, gate = tensors["x"], tensors["gate"]
    if x.shape[0] < 2:
        return _forward_plain(tensors, config)
    half = x.shape[0] // 2
    parts = [
        _forward_plain(
            {"x": x[rows].contiguous(), "weight": tensors["weight"], "gate": gate[rows].contiguous()}, config
        )
        for rows in (slice(0, half), slice(half, None))
    ]
    y = torch.cat([outputs["y"] for outputs, _ in parts])
    return {"y": y}, {"rstd": torch.cat([saved["rstd"] for _, saved in parts])}
