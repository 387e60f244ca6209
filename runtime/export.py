"""The result of a run as files that others load: a PEFT adapter, or safetensors under the published names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from runtime.config import RunConfig
from runtime.lora.files import export_adapter
from runtime.model import blocks
from runtime.parallel.placement import whole_tensor
from runtime.setup import ADDED

SHARD = 4 << 30
"""Bytes after which a new file begins."""
CARRIED = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a definition that belong beside weights: config, tokenizer, chat template."""


def export(model: nn.Module, config: RunConfig, output: Path) -> Path:
    """Write what was trained; every rank calls it, rank 0 writes.

    Returns:
        ``output/adapter`` or ``output/model``.
    """
    if config.lora is not None:
        folder = output / "adapter"
        export_adapter(model, folder, base_model=config.model.weights or config.model.definition)
        return folder
    folder = output / "model"
    export_model(model, folder, Path(config.model.definition))
    return folder


def export_model(model: nn.Module, folder: Path, definition: Path, shard: int = SHARD) -> None:
    """All weights as safetensors with an index, one block gathered at a time.

    Names and layouts are the published ones (transformers' conversion rules, reversed). The folder is written aside and
    renamed, so it is there whole or not at all.

    Args:
        model: sharded or not.
        folder: to write.
        definition: its config and tokenizer files are copied.
        shard: bytes of one file, about.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    aside = folder.with_name(folder.name + ".partial")
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    pending: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    count = 0

    def flush() -> None:
        nonlocal pending, count
        if pending:
            count += 1
            name = f"model-{count:05d}.safetensors"
            save_file(pending, aside / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(pending, name))
            pending = {}

    total = 0
    for group in _groups(model):
        whole = {n: whole_tensor(t).detach().cpu().contiguous() for n, t in group.items()}
        if first:
            for name, value in _published(model, whole).items():
                pending[name] = value.contiguous().clone()
                total += value.numel() * value.element_size()
            if sum(v.numel() * v.element_size() for v in pending.values()) >= shard:
                flush()
    if first:
        flush()
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        for pattern in CARRIED:
            for path in definition.glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copyfile(path, aside / path.name)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    if dist.is_initialized():
        dist.barrier()


def _groups(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Parameters and stored buffers, block by block, then the rest; a tied parameter comes once."""
    stored = set(model.state_dict(keep_vars=True))
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named = {n: t for n, t in named.items() if n in stored and not any(part in n for part in ADDED)}
    for prefix, _ in blocks(model):
        yield {n: named.pop(n) for n in list(named) if n.startswith(prefix + ".")}
    yield named


def _published(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Any] = revert_weight_conversion(model, tensors)
    return reverted
