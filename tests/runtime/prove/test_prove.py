"""Training over ranks equals training in one process. One group of four processes serves every fast check."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernel_templates.tolerance import relative_rms
from runtime.experts.buffers import RingPool
from runtime.experts.dispatch import dispatch
from runtime.experts.packed import pack_experts
from runtime.experts.routing import CountedRouting
from runtime.experts.sites import find_experts
from runtime.experts.transport import Transport
from runtime.lora.adapter import apply_lora, is_adapter, merge
from runtime.lora.config import LoraConfig
from runtime.lora.files import export_adapter, load_adapter
from runtime.parallel.clip import clip_grad_norm
from runtime.parallel.config import BalanceConfig, Compression, ParallelConfig
from runtime.parallel.gradients import after_optimizer_step, finish_gradients, set_gradient_sync
from runtime.parallel.meshes import Meshes, build_meshes
from runtime.parallel.placement import local_part, local_tensor, whole_tensor
from runtime.parallel.reduce import OrderedReduceScatter
from runtime.parallel.shard import parallelize
from runtime.prove import twins
from runtime.prove.case import Case, matrix, quick
from runtime.prove.group import run_ranks
from runtime.prove.proof import Row, prove
from runtime.prove.run import _meshes

RANKS = 4
HIERARCHICAL = ParallelConfig(ep=4, hierarchical="across_first", ranks_per_node=2)


def _rank_zero_holds(facts: dict[str, Any]) -> dict[str, Any]:
    """All ranks' facts, by name, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, facts)
    return {name: [rank[name] for rank in gathered] for name in facts}


# ---- what runs on the ranks -----------------------------------------------------------------------------------------


def _plain_tensor_norm() -> Any:
    """One gradient of each kind: dense over both meshes, of an expert, replicated."""
    meshes = _meshes(ParallelConfig(ep=2, dp_replicate=2), RANKS)
    twin = twins.build("qwen3_moe", torch.float64)
    parallelize(twin, meshes, ParallelConfig(ep=2, dp_replicate=2))
    plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
    parameters = [*twin.parameters(), plain]
    expected = torch.zeros((), dtype=torch.float64)
    for number, parameter in enumerate(parameters):
        whole = torch.full(parameter.shape, 0.01 * (number + 1), dtype=torch.float64)
        parameter.grad = torch.zeros_like(parameter)
        local_tensor(parameter.grad).copy_(whole[local_part(parameter)])
        expected += whole.square().sum()
    norm = clip_grad_norm(parameters, meshes, max_norm=1.0)
    after = clip_grad_norm(parameters, meshes, max_norm=float("inf"))
    assert plain.grad is not None
    return {
        "norm": norm.item(),
        "expected": expected.sqrt().item(),
        "after": after.item(),
        "plain": plain.grad[0].item(),
    }


def _four_experts_norm() -> Any:
    """sqrt(20) on one expert rank and sqrt(100) on the other."""
    meshes = _meshes(ParallelConfig(ep=2), RANKS)
    twin = twins.build("qwen3_moe", torch.float64)
    parallelize(twin, meshes, ParallelConfig(ep=2))
    weight = twin.get_parameter("model.layers.0.mlp.experts.down_proj")
    weight.grad = torch.zeros_like(weight)
    whole = torch.zeros(weight.shape, dtype=torch.float64)
    whole[0, 0, 0], whole[1, 0, 0] = 2.0, 4.0
    whole[4, 0, 0], whole[7, 0, 0] = 6.0, 8.0
    local_tensor(weight.grad).copy_(whole[local_part(weight)])
    return {"norm": clip_grad_norm([weight], meshes, float("inf")).item()}


def _uneven_dispatch(layout: ParallelConfig, poison: bool) -> Any:
    """Ranks with 0, 1, 5 and 7 tokens; expert 3 gets most, expert 6 none; against a loop over tokens."""
    meshes = _meshes(ParallelConfig(**{k: getattr(layout, k) for k in ("ep", "hierarchical", "ranks_per_node")}), RANKS)
    site = find_experts(twins.build("gpt_oss", torch.float64))[0]
    whole = {n: p.detach().clone() for n, p in site.experts.named_parameters()}
    tokens = [0, 1, 5, 7]
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(sum(tokens), 16, dtype=torch.float64, generator=generator)
    index = torch.randint(0, 6, (len(x), 3), generator=generator)
    index[:, 0] = 3
    index[2, 1] = -1
    weights = torch.rand(len(x), 3, dtype=torch.float64, generator=generator)
    upstream = torch.randn(len(x), 16, dtype=torch.float64, generator=generator)
    start = sum(tokens[: meshes.rank])
    mine = slice(start, start + tokens[meshes.rank])
    own = slice(meshes.ep_rank * 8 // layout.ep, (meshes.ep_rank + 1) * 8 // layout.ep)
    pool = RingPool()
    transport = Transport(meshes, layout, 8, CountedRouting(), pool)
    errors: dict[str, float] = {}
    for _ in range(2 if poison else 1):
        pool.fill(float("nan"))
        inputs = [t[mine].clone().requires_grad_() for t in (x, weights)]
        parameters = {n: p[own].clone().requires_grad_() for n, p in whole.items()}
        y = dispatch(transport, site.experts, parameters, inputs[0], index[mine], inputs[1], layout.dispatch_chunks)
        y.backward(upstream[mine])  # type: ignore[no-untyped-call]
        full = {n: p.clone().requires_grad_() for n, p in whole.items()}
        plain = [t.clone().requires_grad_() for t in (x, weights)]
        expected = _token_loop(full, plain[0], index, plain[1])
        (expected * upstream).sum().backward()  # type: ignore[no-untyped-call]
        errors["y"] = _distance(y, expected[mine])
        errors["dx"] = _distance(inputs[0].grad, plain[0].grad[mine])  # type: ignore[index]
        errors["dweights"] = _distance(inputs[1].grad, plain[1].grad[mine])  # type: ignore[index]
        for name, parameter in parameters.items():
            gradient = parameter.grad
            assert gradient is not None  # also for an expert without a token
            errors[name] = max(errors.get(name, 0.0), _distance(gradient, full[name].grad[own]))  # type: ignore[index]
    return {"worst": max(errors.values()), "idle": float(parameters["down_proj"].grad.abs().sum(dim=(1, 2)).min())}  # type: ignore[union-attr]


def _distance(a: Tensor | None, b: Tensor) -> float:
    assert a is not None
    return float((a - b).abs().max()) if b.numel() else 0.0


def _token_loop(w: dict[str, Tensor], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """gpt-oss's experts, one token and slot after another."""
    rows = []
    for token in range(len(x)):
        total = torch.zeros(16, dtype=torch.float64)
        for slot in range(3):
            e = int(index[token, slot])
            if e < 0:
                continue
            h = x[token] @ w["gate_up_proj"][e] + w["gate_up_proj_bias"][e]
            gate, up = h[::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
            hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            total = total + weights[token, slot] * (hidden @ w["down_proj"][e] + w["down_proj_bias"][e])
        rows.append(total)
    return torch.stack(rows)


def _pieces(layout: ParallelConfig) -> Any:
    """Parts and wholes of every parameter, with numbers of experts that divide evenly and ones that do not."""
    twin = twins.build("kimi_linear", torch.float64)
    before = {n: p.detach().clone() for n, p in twin.named_parameters()}
    parallelize(twin, _meshes(layout, RANKS), layout)
    bad = [
        n
        for n, p in twin.named_parameters()
        if not torch.equal(whole_tensor(p), before[n]) or not torch.equal(local_tensor(p), before[n][local_part(p)])
    ]
    return {"bad": bad}


def _adapters(folder: str) -> Any:
    """Train on EP 2 x FSDP 2, export, load on EP 4, merge."""
    ids = torch.randint(0, twins.VOCABULARY, (RANKS, 9), generator=torch.Generator().manual_seed(2))
    config = LoraConfig(r=4, targets=("attention", "gmm"))

    def model(layout: ParallelConfig) -> tuple[nn.Module, Meshes]:
        twin = twins.build("deepseek_v3", torch.float64)
        apply_lora(twin, config)
        meshes = _meshes(layout, RANKS)
        parallelize(twin, meshes, layout)
        return twin, meshes

    trained, meshes = model(ParallelConfig(ep=2))
    mine = ids[meshes.rank : meshes.rank + 1]
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        trained(input_ids=mine, labels=mine, use_cache=False).loss.backward()
        finish_gradients(trained)
        optimizer.step()
        optimizer.zero_grad()
    wholes = {n: whole_tensor(p) for n, p in trained.named_parameters() if is_adapter(n)}
    export_adapter(trained, folder)
    logits = trained(input_ids=mine, use_cache=False).logits
    other, _ = model(ParallelConfig(ep=4))
    load_adapter(other, folder)
    same = all(torch.equal(whole_tensor(other.get_parameter(n)), whole) for n, whole in wholes.items())
    error = relative_rms(other(input_ids=mine, use_cache=False).logits, logits)
    merge(other)
    merged = relative_rms(other(input_ids=mine, use_cache=False).logits, logits)
    filled = min(float((w != 0).double().mean()) for w in wholes.values())
    sums = {n: float(w.double().sum()) for n, w in wholes.items()}
    return {"same": same, "error": error, "merged": merged, "filled": filled, "sums": sums}


def _compressed(compression: Compression) -> Any:
    """The same gradients for 40 steps: the mean of what arrives must go to the true sum."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(RANKS, RANKS * 300, generator=generator) * 10 ** torch.randn(RANKS, 1, generator=generator)
    rank = dist.get_rank()
    scatter = OrderedReduceScatter(compression)
    total = torch.zeros(300, dtype=torch.float64)
    expected = inputs.double().sum(0).view(RANKS, 300)[rank]
    first = 0.0
    steps = 40
    for _ in range(steps):
        output = torch.empty(300)
        scatter(output, inputs[rank].clone(), dist.group.WORLD, dist.ReduceOp.SUM)  # type: ignore[arg-type]
        total += output.double()
        first = first or relative_rms(output, expected)
        if compression == "none":
            ordered = inputs.view(RANKS, RANKS, 300)[:, rank]
            assert torch.equal(output, ((ordered[0] + ordered[1]) + ordered[2]) + ordered[3])
    return {"first": first, "mean": relative_rms(total / steps, expected)}


def _accumulation() -> Any:
    """One batch of four and four of one, weighted by tokens: the same gradients, the same single bias update."""
    ids = torch.randint(0, twins.VOCABULARY, (RANKS, 4, 9), generator=torch.Generator().manual_seed(6))
    layout = ParallelConfig(ep=2, balance=BalanceConfig(method="bias"))
    found: list[dict[str, Tensor]] = []
    for parts in (1, 4):
        twin = twins.build("deepseek_v3", torch.float64)
        meshes = _meshes(ParallelConfig(ep=2), RANKS)
        parallelize(twin, meshes, layout)
        for number, piece in enumerate(ids[meshes.rank].chunk(parts)):
            set_gradient_sync(twin, last=number == parts - 1)
            logits = twin(input_ids=piece, use_cache=False).logits[:, :-1]
            flat = logits.reshape(-1, twins.VOCABULARY)
            (nn.functional.cross_entropy(flat, piece[:, 1:].reshape(-1), reduction="sum") / (RANKS * 4 * 8)).backward()  # type: ignore[no-untyped-call]
        finish_gradients(twin)
        after_optimizer_step(twin)
        found.append({n: whole_tensor(p.grad) for n, p in twin.named_parameters() if p.grad is not None})
        found[-1] |= {n: b.clone() for n, b in twin.named_buffers() if "correction" in n}
    return {"worst": max(relative_rms(found[1][n], found[0][n]) for n in found[0] if found[0][n].abs().max() > 1e-12)}


def _packed() -> Any:
    """Adapters on a base in 8 bits: expert ranks against one process."""
    ids = torch.randint(0, twins.VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(9))
    found: list[dict[str, Tensor]] = []
    for meshes in (_meshes(ParallelConfig(ep=2), RANKS), Meshes.alone("cpu")):
        twin = twins.build("qwen3_moe", torch.float64)
        apply_lora(twin, LoraConfig(r=4, targets=("gmm",)))
        twins.fill(twin, only="_B")
        pack_experts(twin, "fp8")
        parallelize(twin, meshes, ParallelConfig(ep=meshes.ep_size))
        # every rank has the same tokens, so the ranks' sum is RANKS times one process's gradient
        (twin(input_ids=ids, labels=ids, use_cache=False).loss / meshes.world_size).backward()
        found.append({n: whole_tensor(p.grad) for n, p in twin.named_parameters() if p.grad is not None})
    return {"worst": max(relative_rms(found[0][n], found[1][n]) for n in found[1]), "count": len(found[0])}


def _everything(folder: str) -> Any:
    facts = {
        "rows": prove(quick(RANKS), show=False),
        "norm": _rank_zero_holds(_plain_tensor_norm()),
        "four": _rank_zero_holds(_four_experts_norm()),
        "pieces": [
            _rank_zero_holds(_pieces(layout))
            for layout in (ParallelConfig(dp_replicate=2), ParallelConfig(ep=2), ParallelConfig(ep=2, dp_replicate=2))
        ],
        "adapters": _rank_zero_holds(_adapters(folder)),
        "compressed": {c: _rank_zero_holds(_compressed(c)) for c in ("none", "bf16", "fp8")},
        "packed": _rank_zero_holds(_packed()),
        "accumulation": _rank_zero_holds(_accumulation()),
    }
    for name, layout in {
        "flat": ParallelConfig(ep=4),
        "chunks": ParallelConfig(ep=4, dispatch_chunks=3),
        "across_first": HIERARCHICAL,
        "inside_first": ParallelConfig(ep=4, hierarchical="inside_first", ranks_per_node=2, dispatch_chunks=2),
    }.items():
        facts[f"dispatch {name}"] = _rank_zero_holds(_uneven_dispatch(layout, poison=True))
    return facts


# ---- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks found, as rank 0 has it."""
    found: dict[str, Any] = run_ranks(RANKS, _everything, str(tmp_path_factory.mktemp("adapter")))
    return found


def test_cases_3_10_15_quick_rows_equal_one_process(facts: dict[str, Any]) -> None:
    rows: list[Row] = facts["rows"]
    assert len(rows) == len(quick(RANKS))
    for case, difference, _ in rows:
        assert difference.ok, (case.words, difference)


def test_case_1_the_norm_is_one_number_on_every_rank(facts: dict[str, Any]) -> None:
    found = facts["norm"]
    assert len(set(found["norm"])) == 1
    assert found["norm"][0] == pytest.approx(found["expected"][0], rel=1e-12)
    assert found["after"][0] == pytest.approx(1.0, rel=1e-5)
    assert len(set(found["plain"])) == 1


def test_case_2_expert_norms_add_up_over_ranks(facts: dict[str, Any]) -> None:
    assert facts["four"]["norm"] == pytest.approx([120**0.5] * RANKS)


@pytest.mark.parametrize("name", ["flat", "chunks", "across_first", "inside_first"])
def test_cases_9_10_11_ranks_without_tokens_and_dirty_buffers(facts: dict[str, Any], name: str) -> None:
    found = facts[f"dispatch {name}"]
    assert max(found["worst"]) < 1e-12
    assert found["idle"][3] == 0.0  # experts 6 and 7 live on the last rank; their gradient is zero, not missing


def test_cases_19_20_23_every_rank_knows_its_part_of_the_whole(facts: dict[str, Any]) -> None:
    for found in facts["pieces"]:
        assert found["bad"] == [[]] * RANKS


def test_cases_31_32_35_adapters_agree_over_ranks_and_survive_another_layout(facts: dict[str, Any]) -> None:
    found = facts["adapters"]
    assert found["same"] == [True] * RANKS
    assert found["filled"] == [1.0] * RANKS
    assert all(sums == found["sums"][0] for sums in found["sums"])
    assert max(found["error"]) < 1e-6
    assert max(found["merged"]) < 1e-6


@pytest.mark.parametrize(("compression", "first"), [("none", 1e-6), ("bf16", 4e-3), ("fp8", 4e-2)])
def test_error_feedback_loses_nothing(facts: dict[str, Any], compression: str, first: float) -> None:
    found = facts["compressed"][compression]
    assert max(found["first"]) < first
    assert max(found["mean"]) < max(first / 15, 1e-6)


def test_a_packed_base_is_split_like_any_other(facts: dict[str, Any]) -> None:
    assert facts["packed"]["count"] == [8] * RANKS
    assert max(facts["packed"]["worst"]) < 1e-6


def test_case_6_accumulation_changes_nothing(facts: dict[str, Any]) -> None:
    assert max(facts["accumulation"]["worst"]) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix() -> None:
    rows: list[Row] = run_ranks(RANKS, prove, matrix(RANKS), False)
    assert [(case.words, difference.worst) for case, difference, _ in rows if not difference.ok] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_eight_ranks() -> None:
    cases = [case for case in matrix(8) if case.layout.ep == 8 and case.twin in ("qwen3_moe", "deepseek_v3")]
    rows: list[Row] = run_ranks(8, prove, cases, False)
    assert [(case.words, difference.worst) for case, difference, _ in rows if not difference.ok] == []


FAULTS = ("experts scaled by ep", "router gets no gradient", "replicated gradients stay local")


def _with_fault(fault: str) -> list[Row]:
    """Plant a known bug of another runtime, then prove."""
    from runtime.experts import dispatch as module

    honest = module._differentiate

    def scaled(*args: Any) -> list[Any]:
        dx, dweights, *parameters = honest(*args)
        return [dx, dweights, *(None if p is None else p * 2 for p in parameters)]

    def severed(*args: Any) -> list[Any]:
        dx, dweights, *parameters = honest(*args)
        return [dx, torch.zeros_like(dweights), *parameters]

    with pytest.MonkeyPatch.context() as patch:
        if fault == "replicated gradients stay local":
            patch.setattr("runtime.prove.run.finish_gradients", lambda model: None)
        else:
            patch.setattr(module, "_differentiate", scaled if fault == "experts scaled by ep" else severed)
        return prove(
            [Case(layout=ParallelConfig(ep=2)), Case(twin="gpt_oss", dtype="bfloat16", data="skewed")], show=False
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["experts scaled by ep", "router gets no gradient", "replicated gradients stay local"]
)
def test_planted_faults_are_found(fault: str) -> None:
    rows: list[Row] = run_ranks(RANKS, _with_fault, fault)
    assert any(not difference.ok for _, difference, _ in rows)


def test_the_command_refuses_rows_that_do_not_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.prove", "--only", "no such row"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "no row contains" in done.stderr


def test_meshes_of_one_process() -> None:
    assert build_meshes(ParallelConfig(), 1, "cpu") == Meshes.alone("cpu")
