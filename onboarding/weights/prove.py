"""Proof of a mapping on a synthetic checkpoint: the twin's values leave in the published layout and all come back."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onboarding.twin.models import on_meta, resolve
from onboarding.twin.plan import TwinPlan
from onboarding.weights.index import INDEX, pattern
from runtime.weights import BLOCK, Shards, load, materialize, plan_load

SHARD = "64KB"
"""Small enough that the twin's checkpoint has several files."""


def prove_loading(config: dict[str, Any], *, plan: dict[str, Any], published: list[str], fp8: bool) -> str:
    """Write the twin as its publisher would, read it as the runtime does, and compare every value.

    Args:
        config: of the full model; only the twin's own is used.
        plan: the twin's.
        published: patterns of the names in the published checkpoint, companions of quantised tensors left out.
        fp8: the published matrices are stored in fp8 with one scale a block: the synthetic ones too.

    Returns:
        What was shown, in words.

    Raises:
        ArithmeticError: a value did not come back.
        Refused: the runtime refuses the checkpoint.
    """
    from onboarding.twin import build

    model = build(TwinPlan(**{**plan, "layers": tuple(plan["layers"])}), seed=3)
    wanted = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(model, folder)
        if fp8:
            wanted = _to_fp8(model, folder, wanted)
        shards = Shards(folder)
        files = len(list(folder.glob("*.safetensors")))
        names = shards.names()
        fresh = on_meta(resolve(plan["config"]))
        fresh.tie_weights()  # type: ignore[operator]
        steps = plan_load(fresh, shards)
        materialize(fresh, torch.device("cpu"))
        load(fresh, shards, steps)
    worst = compare(fresh.state_dict(), wanted)
    if worst:
        raise ArithmeticError(f"{len(worst)} of {len(wanted)} tensors did not come back: {', '.join(worst[:3])}")
    known = {pattern(n) for n in names} & set(published)
    total = len({pattern(n) for n in names})
    how = "bit for bit" if not fp8 else "through fp8 blocks, as their dequantised values"
    return (
        f"all {len(wanted)} tensors of the twin came back {how} from {len(names)} tensors in {files} files; "
        f"{len(known)} of its {total} kinds of names are names of the published checkpoint"
    )


def write(model: Any, folder: Path) -> None:
    """The model's values in the layout in which its class is published."""
    from safetensors.torch import save_file
    from transformers import PreTrainedModel
    from transformers.utils import logging

    if isinstance(model, PreTrainedModel):
        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder, max_shard_size=SHARD)
        return
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        unique.setdefault(id(value), (name, value.detach().contiguous()))
    save_file(dict(unique.values()), folder / "model.safetensors")


def _to_fp8(model: nn.Module, folder: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store every matrix of the files in fp8 with one scale a block of 128 x 128; returns what must come back.

    What comes back is what plain files with the dequantised values would give.
    """
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, value in load_file(path).items():
            if value.ndim == 2 and value.is_floating_point() and ".layers." in name:
                tensors[name], tensors[f"{name}_scale_inv"] = to_blocks(value)
            else:
                tensors[name] = value
        save_file(tensors, path)
    (folder / INDEX).unlink(missing_ok=True)
    plain = folder / "plain"
    plain.mkdir()
    shards = Shards(folder)
    save_file({name: shards.read(name).contiguous() for name in shards.names()}, plain / "model.safetensors")
    other: Any = on_meta(model.config)
    other.tie_weights()
    source = Shards(plain)
    steps = plan_load(other, source)
    materialize(other, torch.device("cpu"))
    load(other, source, steps)
    return {name: value.detach().clone() for name, value in other.state_dict().items()}


def to_blocks(value: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values ``[M, K]`` and scales ``[ceil(M / 128), ceil(K / 128)]``: value = fp8 x scale of its block."""
    rows, columns = value.shape
    padded = nn.functional.pad(value.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    narrow = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return narrow.to(torch.float8_e4m3fn), scales


def compare(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names whose values differ in any bit, or that are on one side only."""
    differing = sorted(set(got) ^ set(wanted))
    return differing + [n for n in wanted if n in got and not torch.equal(got[n].to(wanted[n].dtype), wanted[n])]


def proven_or_why(config: dict[str, Any], **arguments: Any) -> str:
    """:func:`prove_loading`, or the reason why it failed, in words."""
    from runtime.refusal import Refused

    try:
        return prove_loading(config, **arguments)
    except (ArithmeticError, Refused) as error:
        return f"not proven: {error}"
