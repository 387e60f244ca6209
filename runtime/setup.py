"""From a config to a model that can be stepped. What can be refused is refused before a device is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous

from runtime import weights
from runtime.config import RunConfig, digest
from runtime.data.sources import Source, open_source
from runtime.data.stream import Stream
from runtime.data.tokens import Encoder, open_tokenizer
from runtime.experts.replay import replay_contexts
from runtime.experts.sites import find_experts
from runtime.kernels import apply_bundle, check_bundle
from runtime.lora.adapter import apply_lora, initialize_adapter, is_adapter
from runtime.memory.contexts import joined
from runtime.memory.loss import install_loss
from runtime.memory.recompute import recompute_blocks
from runtime.memory.swap_cache import GIB, SwapCache
from runtime.model import blocks, build, end_token, freeze_towers, initial_values, read_definition
from runtime.packing import Boundaries, prove_isolation
from runtime.parallel.meshes import Meshes, build_meshes
from runtime.parallel.shard import parallelize
from runtime.refusal import Refused
from runtime.telemetry.flops import Flops, count

ADDED = ("lora", "selection_bias")
"""Parts of names of what a run adds to a model: no checkpoint of weights holds it."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its ranks, known before anything is started."""

    rank: int
    local_rank: int
    size: int
    device: str
    """``cuda`` or ``cpu``."""

    @classmethod
    def from_environment(cls, wanted: str) -> World:
        """As torchrun says; one rank where nothing does.

        Raises:
            Refused: ``no-device``.
        """
        # the count comes from the driver's files: asking CUDA for its version would already start it
        has = torch.cuda.is_available()
        if wanted == "cuda" and not has:
            raise Refused("no-device", "the run asks for a GPU and there is none", "set device: cpu, or auto")
        device = "cuda" if has and wanted != "cpu" else "cpu"
        read = {n: int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))}
        return cls(rank=read["RANK"], local_rank=read["LOCAL_RANK"], size=read["WORLD_SIZE"], device=device)


@dataclass(kw_only=True)
class Checked:
    """A run that was found possible, on the meta device."""

    config: RunConfig
    definition: Any
    """transformers' config."""
    model: nn.Module
    source: Source
    encoder: Encoder
    values: weights.Shards | weights.Values
    load: weights.LoadPlan
    flops: Flops
    identity: dict[str, Any]
    """What a checkpoint must share with this run."""


@dataclass(kw_only=True)
class Ready:
    """A model with memory, sharded and loaded."""

    model: nn.Module
    meshes: Meshes
    boundaries: Boundaries
    cache: SwapCache | None
    applied: Any
    """What the bundle put in; None without one."""
    isolated: list[str]
    """Classes of modules that run document by document."""


def check(config: RunConfig, world: World) -> Checked:
    """Read and check everything: data, tokenizer, definition, weights, bundle, layout, adapters.

    Raises:
        Refused: with the fix.
    """
    config.microsteps(world.size)
    definition = read_definition(Path(config.model.definition))
    source = open_source(config.data)
    vocabulary = int(definition.get_text_config().vocab_size)
    tokenizer = open_tokenizer(config.data, Path(config.model.definition), end_token(definition))
    encoder = Encoder(config.data, tokenizer, vocabulary)
    Stream(source, encoder, config.data, lanes=1, mine=[0], microbatch=1).step()  # a first row can be made
    if config.model.bundle is not None:
        check_bundle(config.model)
    model = build(definition, config.model, world.device, storage=storage(config))
    values: weights.Shards | weights.Values
    if config.model.weights is not None:
        values = weights.Shards(Path(config.model.weights))
    else:
        values = weights.Values(initial_values(definition, config.model, world.device))
    load = weights.plan_load(model, values)
    try:
        sites = find_experts(model)
        for experts in [site.num_experts for site in sites] or [0]:
            config.parallel.check(world.size, experts)
        if config.lora is not None:
            apply_lora(model, config.lora)
        elif config.model.towers == "frozen":
            freeze_towers(model)
    except ValueError as error:
        raise Refused("plan-impossible", "the run does not fit the model or the ranks", str(error)) from None
    flops = count(model, config.data.sequence_length)
    shapes = {n: [list(p.shape), p.requires_grad] for n, p in model.named_parameters()}
    identity = {
        **config.identity,
        "model": {"type": definition.model_type, "parameters": digest(shapes)},
        "records": len(source),
    }
    return Checked(
        config=config,
        definition=definition,
        model=model,
        source=source,
        encoder=encoder,
        values=values,
        load=load,
        flops=flops,
        identity=identity,
    )


def storage(config: RunConfig) -> torch.dtype:
    """Dtype of parameters at rest: that of computation where they are frozen, float32 where they are trained."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype if config.lora is not None else torch.promote_types(dtype, torch.float32)


def start(world: World) -> torch.device:
    """Touch the device and join the other ranks (a group of one where there are none)."""
    device = torch.device(world.device, world.local_rank) if world.device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if world.device == "cuda" else "gloo"
    if world.device == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if "MASTER_ADDR" in os.environ:
            # torchrun's store outlives a restart: an attempt must not read the addresses of the one before
            store, rank, size = next(rendezvous("env://"))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return device


def assemble(
    checked: Checked, world: World, device: torch.device, *, alive: Callable[[], None] = lambda: None
) -> Ready:
    """Shard, materialize and load the model, put the kernels in, and prove that packed documents stay apart.

    Args:
        checked: from :func:`check`; its model is used up.
        world: this process.
        device: from :func:`start`.
        alive: called while weights are loaded.
    """
    config, model = checked.config, checked.model
    parallel = replace(config.parallel, deterministic=config.parallel.deterministic or config.step.deterministic)
    # one rank with a frozen base has nothing to gather, to sum or to cast: FSDP would copy every weight in every pass
    alone = world.size == 1 and config.lora is not None
    meshes = Meshes.alone(world.device) if alone else build_meshes(parallel, world.size, world.device)
    cache = None
    if config.memory.recompute == "swap_cache":
        sizes = config.memory.cache_device_gib, config.memory.cache_host_gib
        cache = SwapCache(int(sizes[0] * GIB), int(sizes[1] * GIB), device)
    if config.memory.recompute != "none":
        recompute_blocks(model, joined(replay_contexts, cache.contexts) if cache is not None else replay_contexts)
    if cache is not None:
        cache.watch([block for _, block in blocks(model)])
    install_loss(model, config.memory.loss_chunk)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    exact = alone or all(p.dtype == dtype for p in model.parameters())
    wide = torch.promote_types(dtype, torch.float32)
    parallelize(model, meshes, parallel, param_dtype=None if exact else dtype, reduce_dtype=None if exact else wide)
    weights.materialize(model, device)
    if config.lora is not None:
        initialize_adapter(model)
    weights.load(model, checked.values, checked.load, own=ADDED, alive=alive)
    tokens = config.step.microbatch * config.data.sequence_length
    applied = apply_bundle(model, config.model, tokens) if config.model.bundle is not None else None
    boundaries = Boundaries()
    isolated: list[str] = []
    if config.data.packing != "none":
        isolated = prove_isolation(model, boundaries, lambda ids, at: model(input_ids=ids, position_ids=at))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward alone leaves the root's weights whole
    return Ready(model=model, meshes=meshes, boundaries=boundaries, cache=cache, applied=applied, isolated=isolated)


__all__ = ["ADDED", "Checked", "Ready", "World", "assemble", "check", "is_adapter", "start", "storage"]
