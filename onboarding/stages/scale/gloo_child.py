"""Trains the reduced twin over 1, 2, 4 real processes on this machine and says losses and times.

    python -m onboarding.stages.scale.gloo_child JOB.json

torch is imported once; the ranks are forked from this process before anything starts a thread. Every world size sees
the same sequences, so the losses must agree. Runs no code of a definition and no kernel of a bundle.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from onboarding.twin import TwinPlan, build
from runtime.config import OptimizerConfig, StepConfig
from runtime.data import byte_batches, standard_library_sources
from runtime.data.stream import Rows
from runtime.experts.sites import find_experts
from runtime.memory.loss import install_loss
from runtime.optimizer import make_optimizers
from runtime.packing import Boundaries
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import build_meshes
from runtime.parallel.shard import parallelize
from runtime.step import Stepper

BATCH = 4
"""Sequences of one step, whatever the ranks: the losses then agree."""


class Job(BaseModel):
    """What the parent asks for."""

    plan: str
    sequence_length: int
    worlds: list[int]
    warm: int
    steps: int
    seed: int


def main(arguments: list[str]) -> int:
    """Run the job file named on the command line."""
    job = Job.model_validate_json(Path(arguments[0]).read_text())
    for world in job.worlds:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            ranks = [context.Process(target=_rank, args=(job, rank, world, folder)) for rank in range(world)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                print(f"world {world}: exit status {[p.exitcode for p in ranks]}", file=sys.stderr)
                return 1
            print((Path(folder) / "rank0.json").read_text(), flush=True)
    return 0


def _rank(job: Job, rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        found = train(job, rank, world)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "rank0.json").write_text(json.dumps({"run": found}))


def train(job: Job, rank: int, world: int) -> dict[str, Any]:
    """This rank's share of the steps."""
    plan = TwinPlan.from_json(job.plan)
    model = build(plan, seed=job.seed)
    sites = find_experts(model)
    ep = world if sites and all(site.num_experts % world == 0 for site in sites) else 1
    layout = ParallelConfig(ep=ep)
    meshes = build_meshes(layout, world, "cpu")
    install_loss(model, 0)
    parallelize(model, meshes, layout)
    stepper = Stepper(
        model=model,
        optimizers=make_optimizers(model, OptimizerConfig(schedule="constant"), offload=False),
        meshes=meshes,
        config=StepConfig(batch=BATCH, microbatch=1),
        device=torch.device("cpu"),
        boundaries=Boundaries(),
        seed=job.seed,
    )
    length, losses, times = job.sequence_length, list[float](), list[float]()
    data = byte_batches(standard_library_sources(), BATCH, length + 1, job.seed)
    for number, ids in enumerate(islice(data, job.warm + job.steps), start=1):
        mine = [_rows(ids[lane : lane + 1]) for lane in range(rank, BATCH, world)]
        dist.barrier()
        begin = time.perf_counter()
        losses.append(stepper.run(number, mine).loss)
        if number > job.warm:
            times.append(1e3 * (time.perf_counter() - begin))
    middle = statistics.median(times)
    return {
        "ranks": world,
        "ep": ep,
        "step_ms": middle,
        "tokens_per_second": BATCH * length / middle * 1e3,
        "losses": losses,
    }


def _rows(ids: torch.Tensor) -> Rows:
    length = ids.shape[1] - 1
    return Rows(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        positions=torch.arange(length)[None],
        mask=torch.ones(1, length, dtype=torch.bool),
        lengths=((length,),),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
