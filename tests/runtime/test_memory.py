"""Chunked loss, recomputation, the operator cache and host-resident optimizer state: equal to keeping everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import definition
from torch import Tensor, nn

from runtime import weights
from runtime.config import DataConfig, ModelConfig, RunConfig
from runtime.memory import budget, intercept
from runtime.memory.loss import install_loss, summed_loss
from runtime.memory.offload import HostState
from runtime.memory.recompute import recompute_blocks
from runtime.memory.swap_cache import Counts, Profile, SwapCache
from runtime.model import build, initial_values, read_definition
from runtime.parallel.config import ParallelConfig

CPU = torch.device("cpu")


def small_model(folder: Path, name: str, **changes: Any) -> nn.Module:
    choice = ModelConfig(definition=str(definition(folder, name, **changes)), dtype="float64", seed=1)
    config = read_definition(folder)
    model = build(config, choice, "cpu", storage=torch.float64)
    values = weights.Values(initial_values(config, choice, "cpu"))
    plan = weights.plan_load(model, values)
    weights.materialize(model, CPU)
    weights.load(model, values, plan)
    return model


def batch(rows: int = 2, length: int = 21) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(256, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.3, -100, ids.roll(-1, 1))
    return ids, torch.arange(length).expand(rows, length), labels


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("qwen3-tied", {}), ("qwen3-moe", {})])
@pytest.mark.parametrize("chunk", [0, 1, 8, 1000])
def test_the_loss_in_chunks_is_the_loss(tmp_path: Path, name: str, changes: dict[str, Any], chunk: int) -> None:
    model = small_model(tmp_path, name, **changes)
    ids, positions, labels = batch()

    def stock() -> Tensor:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    expected, wanted = gradients(model, stock)
    install_loss(model, chunk)
    actual, found = gradients(model, lambda: model(ids, positions, labels))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)


def test_chunks_keep_what_the_class_does_to_its_logits(tmp_path: Path) -> None:
    """Gemma-2 caps its logits: softcap tanh(x / softcap)."""
    small = {"final_logit_softcapping": 0.05, "model_type": "gemma2", "query_pre_attn_scalar": 16}
    model = small_model(tmp_path, "llama", **small)
    ids, positions, labels = batch()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()
    assert logits.abs().max() <= 0.05
    install_loss(model, 4)
    torch.testing.assert_close(model(ids, positions, labels).detach(), summed_loss(logits, labels), rtol=1e-12, atol=0)


def test_a_row_without_labels_costs_nothing(tmp_path: Path) -> None:
    model = small_model(tmp_path, "llama")
    install_loss(model, 4)
    ids, positions, labels = batch(1, 9)
    value, found = gradients(model, lambda: model(ids, positions, torch.full_like(labels, -100)))
    assert value == 0
    assert all(not g.any() for g in found.values())


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", pytest.param("qwen3-next", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("device_kib", "host_kib"), [(1 << 20, 0), (0, 1 << 20), (0, 0), (40, 60)])
def test_recomputed_blocks_give_the_same_bits_whatever_is_kept(
    tmp_path: Path, name: str, device_kib: int, host_kib: int
) -> None:
    model = small_model(tmp_path, name)
    ids, positions, labels = batch()

    def loss() -> Tensor:
        return summed_loss(model(input_ids=ids, position_ids=positions, use_cache=False).logits, labels)

    expected, wanted = gradients(model, loss)
    cache = SwapCache(device_kib << 10, host_kib << 10, CPU)
    recompute_blocks(model, cache.contexts)
    for number in range(3):  # measured, planned, planned again
        cache.begin()
        if number == 1:
            cache.counts = Counts()
        actual, found = gradients(model, loss)
        assert torch.equal(actual, expected)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    counts = cache.counts
    for place, most in (("device", device_kib << 10), ("host", host_kib << 10)):
        assert cache.peak[place] <= most
    kept, hits = counts.kept.total() + counts.spilled.total(), counts.hits.total()
    assert hits <= kept
    if device_kib == host_kib == 0:
        assert hits == 0
        assert counts.misses.total() > 0
    elif device_kib == 40:
        assert hits > 0
        assert counts.misses.total() > 0
        assert counts.promoted.total() > 0
    else:
        assert counts.misses.total() == 0
        assert hits == kept
        assert counts.promoted.total() == (0 if device_kib else hits)
    cache.begin()
    assert cache.used == {"device": 0, "host": 0}


def test_places_go_to_what_costs_most_a_byte_and_the_last_stay_on_the_device() -> None:
    cache = SwapCache(100, 100, CPU)
    profile = [
        Profile(key=(0, 0), name="dear", size=60, seconds=6.1),
        Profile(key=(0, 1), name="cheap", size=60, seconds=0.1),
        Profile(key=(1, 0), name="dear", size=60, seconds=6.0),
        Profile(key=(2, 0), name="dearest", size=60, seconds=9.0),
        Profile(key=(2, 1), name="small", size=20, seconds=2.0),
    ]
    # 60 of 200 are left in the end, in two places
    assert cache.make_plan(profile) == {
        (0, 0): "host", (0, 1): "drop", (1, 0): "drop", (2, 0): "device", (2, 1): "device",
    }  # fmt: skip


def test_no_more_goes_to_the_host_than_the_link_carries_in_time() -> None:
    cache = SwapCache(50, 1000, CPU)
    profile = [
        Profile(key=(block, number), name="product", size=40, seconds=float(10 * block + number + 1))
        for block in range(3)
        for number in range(3)
    ]
    every = {(block, number): "host" for block in range(3) for number in range(3)}
    assert cache.make_plan(profile) == {**every, (2, 2): "device"}
    # the last block has no time, the one before it time for one result, the first for all
    found = cache.make_plan(profile, {-1: 1000.0, 2: 0.0, 1: 79.0, 0: 500.0})
    assert found == {
        (2, 2): "device", (2, 1): "drop", (2, 0): "drop", (1, 2): "host", (1, 1): "drop", (1, 0): "drop",
        (0, 2): "host", (0, 1): "host", (0, 0): "host",
    }  # fmt: skip
    # and forward has time for two
    found = cache.make_plan(profile, {-1: 80.0, 2: 0.0, 1: 79.0, 0: 500.0})
    assert sorted(key for key, where in found.items() if where == "host") == [(0, 2), (1, 2)]


def test_the_block_before_is_fetched_when_backward_leaves_a_half() -> None:
    """So that what comes back lies where the second half's activations were."""
    seen: list[str] = []

    class Part(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.weight = name, nn.Parameter(torch.eye(4) * 1.1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x @ self.weight)
            y.register_hook(lambda g: seen.append(f"gradient of {self.name}"))  # type: ignore[no-untyped-call]
            return y

    class Block(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.mixer, self.feed_forward = Part(f"{name} mixer"), Part(f"{name} feed-forward")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.feed_forward(self.mixer(x))
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block("first"), Block("second")])

    model = Model()
    cache = SwapCache(0, 1 << 20, CPU)
    recompute_blocks(model, cache.contexts)
    cache.watch(list(model.layers))
    fetch = cache._fetch
    cache._fetch = lambda block: (seen.append(f"fetch {block}"), fetch(block))[1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        seen.clear()
        cache.begin()
        model.layers[1](model.layers[0](torch.ones(2, 4))).sum().backward()
    assert seen == [
        "gradient of second feed-forward", "fetch 1",
        "gradient of second mixer", "fetch 0",
        "gradient of first feed-forward", "fetch 0",
        "gradient of first mixer", "fetch -1",
    ]  # fmt: skip
    assert cache.counts.promoted.total() == cache.counts.hits.total() > 0


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_result_changed_in_place_is_a_miss(place: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3, dtype=torch.float64) * 2)

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            return y.mul_(3.0).sin() @ self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers[0](x)
            return out

    x = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    plain, cached = Model(), Model()
    cache = SwapCache(*((1 << 20, 0) if place == "device" else (0, 1 << 20)), CPU)
    recompute_blocks(cached, cache.contexts)
    cache.begin()
    cached(x).square().sum().backward()  # measured
    cached.zero_grad()
    cache.counts = Counts()
    cache.begin()
    for model in (plain, cached):
        model(x).square().sum().backward()
    assert getattr(cache.counts, "kept" if place == "device" else "spilled")["aten::mm"] >= 1
    assert torch.equal(plain.layers[0].weight.grad, cached.layers[0].weight.grad)  # type: ignore[arg-type]
    assert cache.counts.misses["aten::mm"] == 1


def test_only_chosen_operators_are_met_and_only_where_somebody_stands() -> None:
    met: list[str] = []

    class Watcher:
        def call(self, name: str, run: Callable[[], Any]) -> Any:
            met.append(name)
            return run()

    x = torch.ones(2, 3, requires_grad=True)
    w = torch.full((3, 3), 0.5, requires_grad=True)
    intercept.cover(["aten::mm", "aten::no_such_operator", "aten::add_"])
    expected = torch.autograd.grad((x @ w).sin().sum(), [x, w])
    assert met == []
    intercept.enter(Watcher())
    y = (x @ w).sin().sum()
    intercept.leave()
    assert met == ["aten::mm"]
    for found, wanted in zip(torch.autograd.grad(y, [x, w]), expected, strict=True):
        assert torch.equal(found, wanted)
    assert met == ["aten::mm"], "backward's own products are another context's"


@torch.library.custom_op("onboard::test_pair", mutates_args=())
def _pair(x: Tensor) -> list[Tensor]:
    """Two results in a list, as every kernel of a bundle gives them."""
    return [x.sin(), x.cos()]


@torch.library.custom_op("onboard::test_one", mutates_args=())
def _one(x: Tensor) -> list[Tensor]:
    """A list of one."""
    return [x.exp()]


_pair.register_autograd(
    lambda ctx, g: g[0] * ctx.x.cos() - g[1] * ctx.x.sin(),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
)
_one.register_autograd(
    lambda ctx, g: g[0] * ctx.saved_tensors[0], setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output)
)


def test_kernels_of_a_bundle_give_lists_and_get_them_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Module()
            block.weight = nn.Parameter(torch.linspace(0.1, 2.0, 5, dtype=torch.float64))
            block.forward = lambda x: sum(_pair(_one(x * block.weight)[0]), x)
            self.layers = nn.ModuleList([block])

    cached = Model()
    weight = cached.layers[0].get_parameter("weight")
    x = torch.arange(5, dtype=torch.float64) / 7
    cache = SwapCache(1 << 20, 0, CPU)
    recompute_blocks(cached, cache.contexts)
    e = (x * weight.detach()).exp()
    expected = x * e * (e.cos() - e.sin())
    for number in range(3):  # measured, planned, planned again
        cache.begin()
        weight.grad = None
        cached.layers[0](x).sum().backward()
        torch.testing.assert_close(weight.grad, expected)
        if number == 0:
            cache.counts = Counts()
    assert cache.counts.hits["onboard::test_one"] == 2
    assert cache.counts.misses.total() == 0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_state_on_the_host_updates_the_same_bits(kind: Any) -> None:
    def weights_after(wrap: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 5, generator=generator)) for _ in range(3)]
        inner = kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], lr=0.01)
        optimizer: Any = HostState(inner) if wrap else inner
        for step in range(4):
            for i, parameter in enumerate(parameters):
                parameter.grad = None if (step, i) == (1, 1) else torch.randn(4, 5, generator=generator)
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == parameters[:2]
        return [p.detach() for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(weights_after(True), weights_after(False), strict=True))


@pytest.mark.parametrize(("ranks", "ep", "replicas"), [(1, 1, 1), (4, 2, 1), (8, 4, 2)])
def test_a_plan_before_sharding_counts_one_ranks_share(tmp_path: Path, ranks: int, ep: int, replicas: int) -> None:
    """What ``--dry-run`` prints for many ranks, by hand."""
    choice = ModelConfig(definition=str(definition(tmp_path, "qwen3-moe")), dtype="float32")
    model = build(read_definition(tmp_path), choice, "cpu", storage=torch.float32)
    config = RunConfig(
        output="out",
        steps=1,
        model=choice,
        data=DataConfig(files=("-",), sequence_length=16),
        parallel=ParallelConfig(ep=ep, dp_replicate=replicas),
    )
    planned = budget.plan(model, config, CPU, tmp_path, ranks).device
    shards = ranks // replicas
    held = sum(math.ceil(p.numel() / shards) for p in model.parameters())
    assert (planned["weights"], planned["gradients"], planned["optimizer"]) == (4 * held, 4 * held, 8 * held)
    block = model.get_submodule("model.layers.0")
    experts = sum(p.numel() for n, p in block.named_parameters() if ".experts." in n)
    dense = sum(p.numel() for p in block.parameters()) - experts
    assert experts > 0
    assert planned["gathered weights"] == (0 if ranks == 1 else 2 * 4 * (dense + experts // ep))
