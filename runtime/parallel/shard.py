"""Put a model on its ranks: experts over the expert mesh, everything else over the dense mesh, in FSDP2 units."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from runtime.experts.balance import Load
from runtime.experts.buffers import RingPool
from runtime.experts.layer import ExpertsLayer
from runtime.experts.replicas import Replicas
from runtime.experts.routing import CountedRouting, RoutingSource
from runtime.experts.sites import Site, expert_parameters, find_experts
from runtime.experts.transport import Transport
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.reduce import order_reductions
from runtime.parallel.state import ParallelState, attach

REPLICATE_BELOW = 2**20
"""Kept fp32 parameters with fewer elements are held whole by every rank: a unit each would cost more than it saves."""
ALWAYS_FP32 = ("A_log", "dt_bias")
"""Decay parameters of linear attention: exponentials of exponentials, ruined by eight bits."""


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    config: ParallelConfig,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    routing: RoutingSource | None = None,
    pool: RingPool | None = None,
) -> None:
    """Shard ``model`` in place and put expert-parallel dispatch into its experts.

    Works on meta tensors (materialize afterwards) and under the ``fake`` backend; then pass a ``LoadRouting`` as
    ``routing`` and step on fake tensors. Every gradient reduction is a sum: scale the loss by the step's global token
    count. Adapters are applied before this (``apply_lora``), activation checkpointing too.

    Args:
        model: a causal language model of transformers, or any module.
        meshes: from ``build_meshes``.
        config: the layout.
        param_dtype: dtype of gathered weights in forward and backward; None keeps the parameters'.
        reduce_dtype: dtype of gradient sums; None takes that of the gradients.
        routing: sizes of the all-to-all; None counts them.
        pool: communication buffers; None makes a ring that sizes itself.

    Raises:
        ValueError: the layout does not fit the model, or needs a process group; says what to change.
    """
    sites = find_experts(model)
    for experts in sorted({site.num_experts for site in sites}) or [0]:
        config.check(meshes.world_size, experts)
    if meshes.dense is None and param_dtype is not None and any(p.dtype != param_dtype for p in model.parameters()):
        raise ValueError(
            f"mixed precision needs a process group; start with torchrun --nproc-per-node 1, or convert the model to "
            f"{param_dtype} first"
        )
    state = ParallelState(meshes=meshes, config=config)
    attach(model, state)
    pool = pool or RingPool()
    for site in sites:
        transport = None
        if meshes.ep_size > 1:
            slots = site.num_experts + config.replicas * meshes.ep_size
            transport = Transport(meshes, config, slots, routing or CountedRouting(), pool)
            _keep_own_experts(site, meshes)
        load = Load(site.num_experts, config.balance, site.block, distributed=meshes.dense is not None)
        replicas = None
        if config.replicas:
            assert meshes.ep is not None  # checked: ep > 1
            replicas = Replicas(meshes.ep.get_group(), site.num_experts, config.replicas)
        layer = ExpertsLayer(site, config, transport, load, replicas)
        layer.install()
        state.layers.append(layer)
    if meshes.dense is not None:
        policy = functools.partial(MixedPrecisionPolicy, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        _shard(model, sites, state, policy(param_dtype=param_dtype), policy(param_dtype=None))


def _keep_own_experts(site: Site, meshes: Meshes) -> None:
    """Replace every [E, ...] parameter by a DTensor of which this rank holds E / ep experts."""
    assert meshes.ep is not None
    for name in expert_parameters(site.experts):
        owner = site.experts.get_submodule(name.rpartition(".")[0])
        full = site.experts.get_parameter(name)
        own = full.detach().chunk(meshes.ep_size)[meshes.ep_rank].clone()
        sharded = DTensor.from_local(own, meshes.ep, [Shard(0)], run_check=False)
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(sharded, requires_grad=full.requires_grad))


def _shard(
    model: nn.Module, sites: list[Site], state: ParallelState, mixed: MixedPrecisionPolicy, exact: MixedPrecisionPolicy
) -> None:
    meshes, config = state.meshes, state.config
    own_units, replicated = _kept_exact(model, mixed.param_dtype)
    # what all ranks use but not every rank's tokens reach in full: experts' parameters that are not one expert's
    for site in sites if meshes.ep_size > 1 else []:
        by_expert = set(expert_parameters(site.experts))
        replicated |= {p for n, p in site.experts.named_parameters() if n not in by_expert}
    state.replicated = [p for p in model.parameters() if p in replicated]
    shard = functools.partial(
        fully_shard, mesh=meshes.data, ignored_params=replicated, reshard_after_forward=config.reshard_after_forward
    )
    blocks = decoder_blocks(model)
    expert_modules = {id(site.experts) for site in sites} if meshes.ep_size > 1 else set()
    units = []
    for block in blocks:
        inner = []
        for module in block.modules():
            if module in own_units:
                inner.append(shard(module, mp_policy=exact))
            elif id(module) in expert_modules:
                inner.append(shard(module, mesh=meshes.expert_data, mp_policy=mixed, shard_placement_fn=_place(meshes)))
        units.append([shard(block, mp_policy=mixed), *inner])
    _shard_ends(model, shard, mixed)
    shard(model, mp_policy=mixed, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # division off alone fails on gloo, which has no averaging
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    order_reductions(model, config)
    _prefetch(units)


def _shard_ends(model: nn.Module, shard: Any, mixed: MixedPrecisionPolicy) -> None:
    """Embedding and head in units of their own unless they are one tensor, which then stays in the root's unit."""
    read = getattr(model, "get_input_embeddings", lambda: None), getattr(model, "get_output_embeddings", lambda: None)
    embedding, head = read[0](), read[1]()
    weights = [getattr(m, "weight", None) for m in (embedding, head)]
    if weights[0] is None or weights[0] is weights[1]:
        return
    shard(embedding, mp_policy=mixed)
    if weights[1] is not None:
        shard(head, mp_policy=mixed, reshard_after_forward=False)


def _place(meshes: Meshes) -> Any:
    """Shard whole experts where they divide evenly, else the next dimension."""
    assert meshes.expert is not None
    ranks, ep = meshes.expert.size(1), meshes.ep_size

    def place(parameter: Tensor) -> Shard:
        if (parameter.shape[0] // ep) % ranks and parameter.shape[1] % ranks == 0:
            return Shard(1)
        return Shard(0)

    return place


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order: those that transformers says must not be split, else the longest ModuleList's."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    blocks = _outermost([m for m in model.modules() if type(m).__name__ in names])
    if blocks:
        return blocks
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return [m for m in modules if id(m) not in inside]


def _kept_exact(model: nn.Module, param_dtype: torch.dtype | None) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """fp32 parameters that must not be cast: modules that make a unit of their own, and the small rest."""
    if param_dtype is None or param_dtype.itemsize >= 4:
        return set(), set()
    patterns = set(ALWAYS_FP32)
    for module in model.modules():
        patterns |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        patterns |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    kept_name = re.compile(r"(^|\.)(" + "|".join(re.escape(p) for p in sorted(patterns)) + r")(\.|$)")
    kept = {p for n, p in model.named_parameters() if p.dtype == torch.float32 and kept_name.search(n)}
    modules: set[nn.Module] = set()
    replicated: set[nn.Parameter] = set()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        ours = [p for p in own if p in kept]
        alone = len(list(module.parameters())) == len(ours)
        if ours and alone and sum(p.numel() for p in ours) >= REPLICATE_BELOW:
            modules.add(module)
        else:
            replicated |= set(ours)
    return modules, replicated


def _prefetch(units: list[list[Any]]) -> None:
    """Each block asks for the next one's weights: reading the all-to-all's sizes on the host hides them from FSDP."""
    for before, after in pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)
