# honest: one program for each row; slow, and right


def forward(tensors, config):
    return _forward_in_tiles(tensors, {**config, "forward_rows": 1})


def _forward_in_tiles(tensors, config):
    x = tensors["x"]
    outputs, saved = outputs_like(tensors, config)
    rows, hidden = saved["rstd"].numel(), x.shape[-1]
    if rows > 0 and hidden > 0:
        # at most 64 programs with work in the interpreter's hands: rows beyond are taken together
        tile = config["forward_rows"] if rows <= 64 else 256
        _forward_kernel[(-(-rows // tile),)](
            x, tensors["weight"], tensors["gate"], outputs["y"], saved["rstd"], rows, hidden,
            ROWS=tile, BLOCK_D=1 << (hidden - 1).bit_length(), num_warps=1,
        )  # fmt: skip
    return outputs, saved
