"""Packed weights: transformers' own decoder is the peer, the published value tables are the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from runtime.experts.packed import _VALUES, Format, pack, pack_experts, unpack
from runtime.experts.sites import find_experts
from runtime.lora.adapter import apply_lora, merge
from runtime.lora.config import LoraConfig
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.prove import twins


def test_transformers_reads_our_blocks_as_we_do() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(0))
    blocks, scales = pack(weight, "mxfp4")
    theirs = convert_moe_packed_tensors(blocks.view(3, 6, 2, 16), scales)  # [E, I, O], as gpt-oss has it
    assert torch.equal(theirs.mT, unpack(blocks, scales, "mxfp4", torch.bfloat16))


def test_every_value_of_the_format_is_kept_exactly() -> None:
    values = torch.tensor([s * v for s, v in itertools.product((1.0, -1.0), _VALUES)] * 2).view(1, 1, 32)
    for exponent in (-100, -3, 0, 5, 100):
        weight = torch.ldexp(values, torch.tensor(exponent))
        assert torch.equal(unpack(*pack(weight, "mxfp4"), "mxfp4", torch.float32), weight)


def test_rounding_is_to_nearest_and_ties_to_even() -> None:
    asked = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.9, -0.75, -2.5, *[4.0] * 20])
    given = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -1.0, -2.0, *[4.0] * 20]
    assert unpack(*pack(asked.view(1, 1, 32), "mxfp4"), "mxfp4", torch.float32).flatten().tolist() == given


def test_zeros_stay_zeros() -> None:
    for kind in ("mxfp4", "fp8"):
        zeros = torch.zeros(2, 3, 64)
        assert torch.equal(unpack(*pack(zeros, kind), kind, torch.float32), zeros)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (130, 257)])
def test_fp8_errs_by_half_a_unit_at_most(rows: int, columns: int) -> None:
    weight = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(1))
    blocks, scales = pack(weight, "fp8")
    assert tuple(blocks.shape) == (2, rows, columns)
    back = unpack(blocks, scales, "fp8", torch.float32)
    # three mantissa bits: 2^-4 of the value, or half the smallest step of its tile
    largest = weight.abs().amax()
    assert bool(((back - weight).abs() <= weight.abs() * 2**-4 + largest / 448 * 2**-10).all())


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize("twin", ["qwen3_moe", "gpt_oss"])
def test_a_packed_base_trains_its_adapter_as_the_unpacked_one_does(twin: str, kind: Format) -> None:
    ids = torch.randint(0, twins.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    found: list[dict[str, torch.Tensor]] = []
    for packed in (True, False):
        model = twins.build(twin, torch.float64)
        for site in find_experts(model):  # widths that groups of 32 divide
            _widen(site.experts)
        apply_lora(model, LoraConfig(r=4, targets=("gmm",)))
        twins.fill(model, only="_B")
        if packed:
            pack_experts(model, kind)
        else:
            _round(model, kind)
        parallelize(model, Meshes.alone("cpu"), ParallelConfig())
        for site in find_experts(model):
            site.experts.forward(*_inputs(ids, 32)).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        if packed:
            with pytest.raises(ValueError, match="packed weights cannot take the update"):
                merge(model)
    assert len(found[0]) == 8
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, msg=name)


def _inputs(ids: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, width, dtype=torch.float64, generator=generator)
    index = torch.rand(7, 8, generator=generator).topk(3).indices
    return x, index, torch.rand(7, 3, dtype=torch.float64, generator=generator)


def _widen(experts: nn.Module) -> None:
    generator = torch.Generator().manual_seed(8)
    transposed = experts.is_transposed
    for name, shape in (("gate_up_proj", (8, 64, 32)), ("down_proj", (8, 32, 32))):
        weight = torch.randn(shape, dtype=torch.float64, generator=generator)
        setattr(experts, name, nn.Parameter(weight.mT.contiguous() if transposed else weight))
    if experts.has_bias:
        experts.gate_up_proj_bias = nn.Parameter(torch.zeros(8, 64, dtype=torch.float64))
        experts.down_proj_bias = nn.Parameter(torch.zeros(8, 32, dtype=torch.float64))


def _round(model: nn.Module, kind: Format) -> None:
    for site in find_experts(model):
        for name in ("gate_up_proj", "down_proj"):
            weight = site.experts.get_parameter(name)
            plain = weight.data.mT if site.experts.is_transposed else weight.data
            rounded = unpack(*pack(plain, kind), kind, torch.float64)
            weight.data = rounded.mT.contiguous() if site.experts.is_transposed else rounded


def test_what_cannot_be_packed_is_refused() -> None:
    model = twins.build("qwen3_moe", torch.float32)
    with pytest.raises(ValueError, match="trains, and packed weights cannot: apply_lora first"):
        pack_experts(model, "mxfp4")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="multiple of 32, not 16; use fp8"):
        pack_experts(model, "mxfp4")
