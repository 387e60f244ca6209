"""One training step of one rank of a large job, on fake tensors in one process: its bytes and its collectives.

    python -m runtime.dryrun --definition FOLDER --ranks 128 --ep 64 --rank 0

The model is built and sharded for real (on the meta device, under torch's ``fake`` process group), then forward,
backward, clipping and the optimizer run under FakeTensorMode: nothing is computed and nothing is sent, but every
collective is seen with its group and its bytes. What a library's kernels may serve is one operator
(:mod:`runtime.leaves`). Token counts come from an even load. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.checkpoint.state import local
from runtime.config import ModelConfig
from runtime.experts.replay import replay_contexts
from runtime.experts.routing import LoadRouting
from runtime.experts.sites import find_experts
from runtime.leaves import leaves
from runtime.lora.adapter import apply_lora
from runtime.lora.config import LoraConfig
from runtime.memory.recompute import recompute_blocks
from runtime.model import build, read_definition
from runtime.parallel.clip import clip_grad_norm
from runtime.parallel.config import ParallelConfig
from runtime.parallel.gradients import after_optimizer_step, counting, finish_gradients
from runtime.parallel.meshes import build_meshes
from runtime.parallel.shard import parallelize
from runtime.refusal import Refused

aten = torch.ops.aten
KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Calls of one kind, over groups of one size."""

    kind: str
    ranks: int
    """Of its group."""
    phase: str
    """``forward``, ``backward`` or ``update``."""
    calls: int
    bytes: int
    """Of the larger side of each call on this rank, all calls together: what a gather makes, what a scatter reads."""


@dataclass(kw_only=True)
class DryRun:
    """What one rank holds and sends in one step."""

    rank: int
    ranks: int
    ep: int
    tokens: int
    """Of this rank's micro-batch."""
    parameters: int
    """Of the whole model."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    collectives: list[Collective] = field(default_factory=list)
    seconds: float = 0.0
    host_bytes: int = 0
    """Peak resident memory of the process that ran this."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives with their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.calls: Counter[tuple[str, int, str]] = Counter()
        self.bytes: Counter[tuple[str, int, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _run(func, args, kwargs or {})
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            kind = next((word for part, word in KINDS.items() if part in name), "")
            if kind:
                key = (kind, _group_size(func, args, kwargs or {}), self.phase)
                self.calls[key] += 1
                self.bytes[key] += _bytes(*args, *(result if isinstance(result, tuple) else (result,)))
        return result

    def found(self) -> list[Collective]:
        """All kinds, largest first."""
        rows = [
            Collective(kind=k[0], ranks=k[1], phase=k[2], calls=n, bytes=self.bytes[k]) for k, n in self.calls.items()
        ]
        return sorted(rows, key=lambda row: -row.bytes)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; where its result depends on values, take the full-size case."""
    if func is aten.nonzero.default:
        return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is aten.index.Tensor:
        kept = [
            i.new_zeros((i.numel(),), dtype=torch.int64) if i is not None and i.dtype == torch.bool else i
            for i in args[1]
        ]
        args = (args[0], kept, *args[2:])
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        if func is not aten._local_scalar_dense.default:
            raise
        return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1


def _bytes(*values: Any) -> int:
    """Of the largest tensor, or list of tensors, among a call's arguments and results."""
    parts = [tree_leaves(v) for v in values if not isinstance(v, torch.ScriptObject)]
    return max((sum(t.numel() * t.element_size() for t in p if isinstance(t, Tensor)) for p in parts), default=0)


def _group_size(func: Any, args: Any, kwargs: Any) -> int:
    """Ranks of the group that a collective's arguments name: a script object, or a name."""
    for value in [*tree_leaves(args), *tree_leaves(kwargs)]:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except (RuntimeError, TypeError):
                continue  # a reduction operator is a script object too
        if isinstance(value, str):
            try:
                return torch._C._distributed_c10d._resolve_process_group(value).size()  # type: ignore[arg-type]  # a str
            except (RuntimeError, ValueError, LookupError):
                continue  # the name of a reduction
    return dist.get_world_size()


def dry_run(
    definition: Path,
    *,
    ranks: int,
    parallel: ParallelConfig,
    rank: int = 0,
    tokens: int = 128,
    lora: LoraConfig | None = None,
) -> DryRun:
    """Build and step one rank. Starts (and ends) a fake process group: one call at a time in a process.

    Args:
        definition: folder with the model's ``config.json``.
        ranks: of the job.
        parallel: how they share the work.
        rank: which of them this process plays.
        tokens: of its micro-batch: bytes of all-to-alls grow linearly with them, those of weights not at all.
        lora: adapters; None trains all parameters.

    Raises:
        Refused: the layout does not fit the ranks or the model, or the definition cannot be used.
    """
    begun = time.monotonic()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        return _stepped(definition, ranks, parallel, rank, tokens, lora, begun)
    except ValueError as error:
        raise Refused("plan-impossible", "the layout does not fit the model or the ranks", str(error)) from None
    finally:
        dist.destroy_process_group()


def _stepped(
    definition: Path,
    ranks: int,
    parallel: ParallelConfig,
    rank: int,
    tokens: int,
    lora: LoraConfig | None,
    begun: float,
) -> DryRun:
    config = read_definition(definition)
    # on a GPU the experts run as grouped products; which weights there are does not depend on it
    choice = ModelConfig(definition=str(definition), dtype="bfloat16", experts="grouped_mm")
    storage = torch.bfloat16 if lora is not None else torch.float32
    model: Any = build(config, choice, "cpu", storage=storage)
    whole = sum(p.numel() for p in model.parameters())
    if lora is not None:
        apply_lora(model, lora)
    recompute_blocks(model, replay_contexts)
    sites = find_experts(model)
    routing = LoadRouting(sites[0].num_experts) if sites else None
    meshes = build_meshes(parallel, ranks, "cpu")
    parallelize(
        model,
        meshes,
        parallel,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        routing=routing,
    )
    watch = Watch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=False)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with leaves(model), watch, counting(model, global_tokens=tokens * ranks):
            loss = _loss(model, ids)
            watch.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
        with watch:
            watch.phase = "update"
            finish_gradients(model)
            clip_grad_norm(trained, meshes, 1.0)
            optimizer.step()
            after_optimizer_step(model)
        gradients = sum(_local_bytes(p.grad) for p in trained if p.grad is not None)
        state = sum(
            _local_bytes(value) for s in optimizer.state.values() for value in s.values() if isinstance(value, Tensor)
        )
    return DryRun(
        rank=rank,
        ranks=ranks,
        ep=parallel.ep,
        tokens=tokens,
        parameters=whole,
        weight_bytes=sum(_local_bytes(p) for p in model.parameters()),
        gradient_bytes=gradients,
        optimizer_bytes=state,
        collectives=watch.found(),
        seconds=round(time.monotonic() - begun, 1),
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().logsumexp(-1).mean()


def _local_bytes(tensor: Tensor) -> int:
    own = local(tensor)
    return own.numel() * own.element_size()


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="runtime.dryrun", description=__doc__)
    parser.add_argument("--definition", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="train all parameters instead of adapters")
    options = parser.parse_args(arguments)
    try:
        found = dry_run(
            options.definition,
            ranks=options.ranks,
            parallel=ParallelConfig(ep=options.ep),
            rank=options.rank,
            tokens=options.tokens,
            lora=None if options.full else LoraConfig(targets=("linear", "gmm") if options.ep > 1 else ("linear",)),
        )
    except Refused as refused:
        print(json.dumps({"problem": refused.to_dict()}))
        return 1
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
