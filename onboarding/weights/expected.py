"""The tensors that a checkpoint of a definition must fill, by name, without memory for them."""

from __future__ import annotations

from typing import Any


def expected_tensors(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameters and stored buffers of the full model: name, shape, dtype, and the name it is tied to, if any.

    Raises:
        Problem: the model cannot be built.
    """
    from onboarding.stages.parse.build import build_config, build_model

    model, _, _ = build_model(build_config(config))
    first: dict[int, str] = {}
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = first.setdefault(id(tensor), name)
        found.append(
            {
                "name": name,
                "shape": [int(size) for size in tensor.shape],
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "tied_to": owner if owner != name else "",
            }
        )
    return found
