"""Two optimizer steps of one case, over ranks or in one process, and everything they leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.experts.replay import replay_contexts
from runtime.lora.adapter import apply_lora
from runtime.lora.config import LoraConfig
from runtime.parallel.clip import clip_grad_norm
from runtime.parallel.config import ParallelConfig
from runtime.parallel.gradients import after_optimizer_step, counting, finish_gradients, set_gradient_sync
from runtime.parallel.meshes import Meshes, build_meshes
from runtime.parallel.placement import whole_tensor
from runtime.parallel.shard import parallelize
from runtime.parallel.state import state_of
from runtime.prove import twins
from runtime.prove.case import Case, Data

STEPS, MICRO_BATCHES, SEQUENCE = 2, 2, 9
SEED = 7
SKEWED_TO = 3
"""Experts that get all tokens of skewed data: as many as a token has, so all on one rank of two, two of four."""


@dataclass
class Outcome:
    """What a run leaves, by name; whole tensors on the CPU."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the last step, before clipping."""
    weights: dict[str, Tensor]
    """After the last step, trained ones and buffers."""
    counts: dict[str, Tensor]
    """Load, dropped and rerouted slots of the last step."""


def batches(ranks: int, data: Data, seed: int) -> list[list[list[Tensor]]]:
    """int64 [sequences, SEQUENCE] for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(seed)

    def sequences(step: int, micro: int, rank: int) -> int:
        if data == "empty":
            return 0 if (step + micro + rank) % 2 else 2
        return 1 + (rank + step + micro) % 3

    return [
        [
            [
                torch.randint(twins.VOCABULARY, (sequences(step, micro, rank), SEQUENCE), generator=generator)
                for rank in range(ranks)
            ]
            for micro in range(MICRO_BATCHES)
        ]
        for step in range(STEPS)
    ]


def run(case: Case, ranks: int, alone: bool, dtype: torch.dtype | None = None, seed: int = SEED) -> Outcome:
    """Train the case's twin for two steps.

    Args:
        case: what to run.
        ranks: of the data, whoever works on it.
        alone: whether this process does all ranks' work by itself, with no sharding, dispatch or recomputation.
        dtype: of the whole model instead of the case's, for references.
        seed: of the data.

    Returns:
        the outcome; for a run over ranks every rank has it.
    """
    model, meshes = _prepare(case, ranks, alone, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    outcome = Outcome([], [], {}, {}, {})
    for step in batches(ranks, case.data, seed):
        tokens = sum(ids[:, 1:].numel() for micro in step for ids in micro)
        total = torch.zeros((), dtype=torch.float64)
        turns = _alone(step, case) if alone else [micro[meshes.rank] for micro in step]
        for number, ids in enumerate(turns):
            set_gradient_sync(model, last=number == len(turns) - 1)
            real = torch.ones(max(len(ids), 1), SEQUENCE, dtype=torch.bool) & bool(len(ids))
            if not len(ids):  # a rank whose data has run out works on padding
                ids = torch.zeros(1, SEQUENCE, dtype=torch.int64)
            with counting(model, real, global_tokens=sum(ids.numel() for micro in step for ids in micro)):
                loss = _loss(model, ids, real) / tokens
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        if not alone:
            dist.all_reduce(total)
        finish_gradients(model)
        outcome.gradients = {n: whole_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        outcome.losses.append(float(total))
        outcome.norms.append(float(clip_grad_norm(trained, meshes, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        report = after_optimizer_step(model)
        assert report is not None
        outcome.counts = {"load": report.load, "dropped": report.dropped, "rerouted": report.rerouted}
    outcome.weights = {n: whole_tensor(p).clone() for n, p in model.named_parameters() if p.requires_grad}
    outcome.weights |= {n: b.detach().clone() for n, b in model.named_buffers() if b.is_floating_point()}
    return outcome


@cache
def _meshes(layout: ParallelConfig, ranks: int) -> Meshes:
    """One set of groups a layout: each gloo group keeps threads for as long as the process lives."""
    return build_meshes(layout, ranks, "cpu")


def _groups(layout: ParallelConfig) -> ParallelConfig:
    """Only what decides which groups there are."""
    return ParallelConfig(
        ep=layout.ep,
        dp_replicate=layout.dp_replicate,
        hierarchical=layout.hierarchical,
        ranks_per_node=layout.ranks_per_node,
    )


def _prepare(case: Case, ranks: int, alone: bool, dtype: torch.dtype | None) -> tuple[nn.Module, Meshes]:
    mixed = case.dtype == "bfloat16"
    own = torch.float32 if mixed else getattr(torch, case.dtype)
    model = twins.build(case.twin, dtype or own)
    if case.recompute and not alone:
        model.activation_checkpointing_enable(  # type: ignore[operator]
            activation_checkpointing_kwargs={"use_reentrant": False, "context_fn": replay_contexts}
        )
    if case.lora:
        apply_lora(model, LoraConfig(r=4, alpha=8.0, targets=("attention", "gmm")), dtype=dtype or own)
        twins.fill(model, only="_B")
    meshes = Meshes.alone("cpu") if alone else _meshes(_groups(case.layout), ranks)
    parallelize(
        model,
        meshes,
        case.layout if not alone else ParallelConfig(balance=case.layout.balance),
        param_dtype=torch.bfloat16 if mixed and not alone else None,
        reduce_dtype=torch.float32 if mixed and not alone else None,
    )
    if case.data == "skewed":
        for layer in state_of(model).layers:
            layer.allowed = torch.arange(layer.site.num_experts) < SKEWED_TO
    return model, meshes


def _alone(step: list[list[Tensor]], case: Case) -> list[Tensor]:
    """One process takes one rank's sequences after another, or all of a micro-batch where their load is joint."""
    if case.layout.balance.aux_loss:
        return [torch.cat(micro) for micro in step]
    # steps that a model rounds to fp32 then see the same bits
    return [ids for micro in step for ids in micro if len(ids)]


def _loss(model: nn.Module, ids: Tensor, real: Tensor) -> Tensor:
    """Summed next-token loss of real tokens."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    flat = logits.reshape(-1, logits.shape[-1])
    wide = torch.promote_types(flat.dtype, torch.float32)
    labels = ids.masked_fill(~real, -100)[:, 1:].reshape(-1)
    return F.cross_entropy(flat.to(wide), labels, reduction="sum")
