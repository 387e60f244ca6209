"""Models built without memory and loaded from safetensors: bit for bit what transformers loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import CONFIGS, definition
from safetensors.torch import load_file, save_file

from runtime import weights
from runtime.config import ModelConfig
from runtime.export import export_model
from runtime.model import blocks, build, freeze_towers, in_tower, initial_values, model_class, read_definition
from runtime.refusal import Refused

CPU = torch.device("cpu")


def saved(folder: Path, name: str, **changes: Any) -> Any:
    """Definition and weights of a small model under ``folder``, in several files; returns the model."""
    config = read_definition(definition(folder, name, **changes))
    torch.manual_seed(0)
    model = model_class(config)._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def empty(folder: Path, storage: torch.dtype = torch.float32) -> Any:
    return build(read_definition(folder), ModelConfig(definition=str(folder)), "cpu", storage=storage)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_streamed_weights_are_what_transformers_loads_and_come_out_as_they_went_in(tmp_path: Path, name: str) -> None:
    published = saved(tmp_path, name)
    peer = type(published).from_pretrained(tmp_path, dtype=torch.float32)
    model = empty(tmp_path)
    assert all(p.is_meta for p in model.parameters())
    shards = weights.Shards(tmp_path)
    plan = weights.plan_load(model, shards)
    weights.materialize(model, CPU)
    weights.load(model, shards, plan)
    expected, found = peer.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[k], v) for k, v in expected.items())
    buffers = dict(peer.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == published.config.tie_word_embeddings

    export_model(model, tmp_path / "out", tmp_path, shard=100_000)
    index = json.loads((tmp_path / "out" / weights.INDEX).read_text())["weight_map"]
    first = json.loads((tmp_path / weights.INDEX).read_text())["weight_map"]
    assert index.keys() == first.keys()
    for key, file in first.items():
        again = load_file(tmp_path / "out" / index[key])[key]
        assert torch.equal(again, load_file(tmp_path / file)[key])


def test_initial_values_are_the_classs_own_by_seed(tmp_path: Path) -> None:
    config = read_definition(definition(tmp_path, "llama"))
    choice = ModelConfig(definition=str(tmp_path), seed=3)
    torch.manual_seed(3)
    expected = model_class(config)._from_config(config, dtype=torch.float32).state_dict()
    values = initial_values(config, choice, "cpu")
    assert all(torch.equal(values[k], v) for k, v in expected.items())


def test_parameters_that_the_class_keeps_in_float32_stay_there(tmp_path: Path) -> None:
    model = empty(definition(tmp_path, "llama"), torch.bfloat16)
    model._keep_in_fp32_modules_strict = None
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    type(model)._keep_in_fp32_modules_strict, before = {"norm"}, type(model)._keep_in_fp32_modules_strict
    try:
        kept = empty(tmp_path, torch.bfloat16)
    finally:
        type(model)._keep_in_fp32_modules_strict = before
    assert all((p.dtype == torch.float32) == ("norm" in n) for n, p in kept.named_parameters())


def test_towers_are_no_part_of_the_language_model() -> None:
    assert in_tower("model.visual.blocks.0.attn.qkv.weight")
    assert not in_tower("model.language_model.layers.0.mlp.up_proj.weight")
    holder = torch.nn.ModuleDict({"visual": torch.nn.Linear(2, 3), "text": torch.nn.Linear(2, 3)})
    assert freeze_towers(holder) == 9
    assert [p.requires_grad for p in holder["visual"].parameters()] == [False, False]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_missing_tensor_is_named_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name)
    index = json.loads((tmp_path / weights.INDEX).read_text())
    gone = "model.layers.1.self_attn.k_proj.weight"
    path = tmp_path / index["weight_map"].pop(gone)
    save_file({k: v for k, v in load_file(path).items() if k != gone}, path)
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    with pytest.raises(Refused, match=r"layers\.1\.self_attn\.k_proj") as refused:
        weights.plan_load(empty(tmp_path), weights.Shards(tmp_path))
    assert refused.value.kind == "weights-incomplete"


def test_a_missing_or_damaged_file_and_another_model_are_told_apart(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    definition(tmp_path / "wide", "llama", hidden_size=128)
    with pytest.raises(Refused, match="other shapes"):
        weights.plan_load(empty(tmp_path / "wide"), weights.Shards(tmp_path))
    files = sorted(tmp_path.glob("*.safetensors"))
    files[1].write_bytes(files[1].read_bytes()[:-100])
    with pytest.raises(Refused, match="is damaged"):
        weights.Shards(tmp_path)
    files[1].unlink()
    with pytest.raises(Refused, match=f"fetch {files[1].name}"):
        weights.Shards(tmp_path)
    with pytest.raises(Refused, match="no safetensors"):
        weights.Shards(tmp_path / "wide")
    (tmp_path / "other").mkdir()
    save_file({"unrelated": torch.zeros(2)}, tmp_path / "other" / "a.safetensors")
    with pytest.raises(Refused, match="fit none"):
        weights.plan_load(empty(tmp_path / "wide"), weights.Shards(tmp_path / "other"))


def test_block_quantised_values_are_scaled_block_by_block(tmp_path: Path) -> None:
    values = torch.randn(200, 130, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 5.0).reshape(2, 2)
    save_file({"w.weight": values, "w.weight_scale_inv": scale}, tmp_path / "a.safetensors")
    shards = weights.Shards(tmp_path)
    assert shards.names() == ["w.weight"]
    expected = torch.stack(
        [torch.stack([values[i, j].float() * scale[i // 128, j // 128] for j in range(130)]) for i in (0, 127, 128)]
    )
    assert torch.equal(shards.read("w.weight")[[0, 127, 128]], expected)
    save_file({"w.weight": values, "w.weight_scale_inv": torch.ones(3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(Refused, match="quantised in a way"):
        weights.Shards(tmp_path).read("w.weight")
    save_file({"w.blocks": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    with pytest.raises(Refused, match="unknown format"):
        weights.Shards(tmp_path).read("w.blocks")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not JSON"), ('{"model_type": "alien"}', "alien"), ('{"model_type": "vit"}', "no language model")],
)
def test_definitions_that_cannot_be_used_are_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(Refused, match=r"no config\.json"):
        read_definition(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Refused, match=words):
        model_class(read_definition(tmp_path))


def test_blocks_are_those_of_the_language_model(tmp_path: Path) -> None:
    model = empty(definition(tmp_path, "qwen3-next"))
    assert [n for n, _ in blocks(model)] == [f"model.layers.{i}" for i in range(4)]
    with pytest.raises(Refused, match="no list of blocks"):
        blocks(torch.nn.Linear(1, 1))


READS = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.testing._internal.distributed.fake_pg import FakeStore
from runtime import weights
from runtime.config import ModelConfig
from runtime.model import build, read_definition
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import build_meshes
from runtime.parallel.placement import local_tensor
from runtime.parallel.shard import parallelize

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
read = []
own_read = weights.Shards.read
weights.Shards.read = lambda self, name: read.append(name) or own_read(self, name)
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
model = build(read_definition(folder), ModelConfig(definition=str(folder)), "cpu", storage=torch.float32)
shards = weights.Shards(folder)
plan = weights.plan_load(model, shards)
config = ParallelConfig(ep=2)
parallelize(model, build_meshes(config, 4, "cpu"), config)
weights.materialize(model, torch.device("cpu"))
weights.load(model, shards, plan)
torch.save(({n: local_tensor(p).detach() for n, p in model.named_parameters()}, read), folder / "held.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_reads_only_what_it_holds(tmp_path: Path, rank: int) -> None:
    """Four ranks as ep 2 x efsdp 2 under the fake backend, each in a process of its own: parts of published tensors."""
    published = saved(tmp_path, "qwen3-moe").state_dict()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", READS, str(tmp_path), str(rank)], env=env, check=True)
    held, read = torch.load(tmp_path / "held.pt")
    ep_rank, efsdp_rank = rank % 2, rank // 2
    for name, value in published.items():
        if "experts" in name:
            mine = value.chunk(2)[ep_rank].chunk(2)[efsdp_rank]
        else:
            chunks = value.chunk(4)
            mine = chunks[rank] if rank < len(chunks) else value[:0]
        assert torch.equal(held[name], mine), name
    experts = {int(n.split("experts.")[1].split(".")[0]) for n in read}  # nothing but experts is read whole
    assert experts == set(range(8)[ep_rank * 4 :][:4][efsdp_rank * 2 :][:2])
