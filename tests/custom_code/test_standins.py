"""The stand-ins compute what the packages document: against torch, transformers' own versions and closed forms."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onboarding.custom_code.load import PACKAGES

TOPS = ("flash_attn", "causal_conv1d", "fla", "mamba_ssm", "deep_gemm")


@pytest.fixture(scope="module")
def standin() -> Iterator[Any]:
    """``standin("fla.ops.kda")``: the stand-in, importable during these tests only."""
    sys.path.insert(0, str(PACKAGES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    sys.path.remove(str(PACKAGES))
    for name in [name for name in sys.modules if name.partition(".")[0] in TOPS]:
        del sys.modules[name]


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def same(one: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and every gradient agree in float64."""
    torch.testing.assert_close(one, other)
    weights = torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape)
    first = torch.autograd.grad((one * weights).sum(), inputs, allow_unused=True, retain_graph=True)
    second = torch.autograd.grad((other * weights).sum(), inputs, allow_unused=True, retain_graph=True)
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("queries", "keys", "heads"), [(7, 7, 2), (3, 7, 1), (1, 5, 4)])
def test_flash_attention_is_torch_attention(standin: Any, queries: int, keys: int, heads: int) -> None:
    q, k, v = randn(2, queries, 4, 8), randn(2, keys, heads, 8, seed=1), randn(2, keys, heads, 6, seed=2)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    want = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    same(standin("flash_attn").flash_attn_func(q, k, v, causal=True), want, [q, k, v])


def test_flash_attention_windows_softcaps_and_packs(standin: Any) -> None:
    flash = standin("flash_attn")
    q, k, v = (randn(1, 9, 2, 4, seed=s) for s in range(3))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 2
    scores = 5 * torch.tanh(scores / 5)
    row, column = torch.arange(9)[:, None], torch.arange(9)[None]
    seen = (column <= row) & (column > row - 3)
    want = torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    same(flash.flash_attn_func(q, k, v, causal=True, window_size=(2, 0), softcap=5.0), want, [q, k, v])
    ends = torch.tensor([0, 4, 4, 9])
    got = flash.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 5, 5, causal=True)
    parts = [flash.flash_attn_func(q[:, a:b], k[:, a:b], v[:, a:b], causal=True)[0] for a, b in ((0, 4), (4, 9))]
    same(got, torch.cat(parts), [q, k, v])
    with pytest.raises(NotImplementedError, match="alibi"):
        flash.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2))


def test_unpadding_comes_back(standin: Any) -> None:
    padding = standin("flash_attn.bert_padding")
    x, mask = randn(3, 5, 2), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    rows, indices, ends, longest, lengths = padding.unpad_input(x, mask)
    assert (ends.tolist(), longest, lengths.tolist()) == ([0, 2, 7, 7], 5, [2, 5, 0])
    same(padding.pad_input(rows, indices, 3, 5), x * mask[..., None], [x])


def test_rotary_turns_the_first_channels(standin: Any) -> None:
    x, angle = randn(2, 5, 3, 8), torch.arange(10, dtype=torch.float64).view(5, 2) / 3
    apply = standin("flash_attn.layers.rotary").apply_rotary_emb
    turned = torch.view_as_complex(torch.stack([x[..., 0:2], x[..., 2:4]], -1))
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    want = torch.cat([turned.real, turned.imag, x[..., 4:]], -1)
    same(apply(x, angle.cos(), angle.sin()), want, [x])
    paired = torch.view_as_complex(x[..., :4].reshape(2, 5, 3, 2, 2))
    paired = torch.view_as_real(paired * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)
    same(apply(x, angle.cos(), angle.sin(), interleaved=True), torch.cat([paired, x[..., 4:]], -1), [x])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("length", [1, 6])
def test_causal_convolution(standin: Any, activation: str | None, length: int) -> None:
    convolve = standin("causal_conv1d").causal_conv1d_fn
    x, w, b = randn(2, 3, length), randn(3, 4), randn(3)
    sums = [
        b + sum((w[:, 3 - s] * x[:, :, t - s] for s in range(4) if t >= s), torch.zeros(2, 3, dtype=torch.float64))
        for t in range(length)
    ]
    want = torch.stack(sums, -1)
    same(convolve(x, w, b, activation=activation), F.silu(want) if activation else want, [x, w, b])
    first, state = convolve(x, w, b, return_final_states=True, activation=activation)
    second = convolve(x, w, b, initial_states=state, activation=activation)
    whole = convolve(torch.cat([x, x], -1), w, b, activation=activation)
    same(torch.cat([first, second], -1), whole, [x, w, b])


def test_delta_rules_are_transformers_own(standin: Any) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as kimi
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as qwen

    q, k, v = (torch.randn(2, 70, 3, 16, generator=torch.Generator().manual_seed(s)) for s in range(3))
    beta = torch.rand(2, 70, 3, generator=torch.Generator().manual_seed(5))
    g = -torch.rand(2, 70, 3, 16, generator=torch.Generator().manual_seed(4))
    for ours, theirs, gate in (
        (standin("fla.ops.kda").chunk_kda, kimi, g),
        (standin("fla.ops.gated_delta_rule").chunk_gated_delta_rule, qwen, g[..., 0]),
    ):
        tensors = [t.clone().requires_grad_() for t in (q, k, v, gate, beta)]
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        got, state = ours(*tensors, **options)
        want, other = theirs(*tensors, initial_state=None, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-5)
        pairs = zip(torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(want.sum(), tensors), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_linear_attention_without_the_delta_rule(standin: Any) -> None:
    q, k, v, g = randn(1, 5, 2, 3), randn(1, 5, 2, 3, seed=1), randn(1, 5, 2, 4, seed=2), randn(1, 5, 2, seed=3)
    decay = torch.stack([g[:, s + 1 : t + 1].sum(1) for t in range(5) for s in range(t + 1)])
    pairs = [(t, s) for t in range(5) for s in range(t + 1)]
    want = torch.zeros(1, 5, 2, 4, dtype=torch.float64)
    for (t, s), d in zip(pairs, decay, strict=True):
        score = (q[:, t] * k[:, s]).sum(-1) * 3**-0.5 * d.exp()
        want = want + F.one_hot(torch.tensor(t), 5)[None, :, None, None] * (score[..., None] * v[:, s])[:, None]
    got, _ = standin("fla.ops.simple_gla").chunk_simple_gla(q, k, v, g)
    same(got, want, [q, k, v, g])
    got, _ = standin("fla.ops.gla").chunk_gla(q, k, v, g[..., None].expand(-1, -1, -1, 3))
    same(got, want, [q, k, v, g])


def test_the_kda_gate(standin: Any) -> None:
    gate = standin("fla.ops.kda.gate").fused_kda_gate
    g, a, bias = randn(2, 3, 4, 5), randn(4), randn(20)
    want = -a.exp()[:, None] * F.softplus(g + bias.view(4, 5))
    same(gate(g, a, dt_bias=bias), want, [g, a, bias])
    same(gate(g.flatten(2), a, 5, g_bias=bias), want, [g, a, bias])


def test_gated_norms(standin: Any) -> None:
    x, z, w = randn(2, 3, 8), randn(2, 3, 8, seed=1), randn(8)
    fused = standin("fla.modules").FusedRMSNormGated(8, eps=1e-3, activation="sigmoid").double()
    got = torch.func.functional_call(fused, {"weight": w}, (x, z))
    same(got, F.rms_norm(x, (8,), w, 1e-3) * torch.sigmoid(z), [x, z, w])
    rmsnorm = standin("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
    same(rmsnorm(x, w, None, z=z, eps=1e-3), F.rms_norm(x, (8,), w, 1e-3) * F.silu(z), [x, z, w])
    gated = F.rms_norm((x * F.silu(z)).reshape(2, 3, 2, 4), (4,), None, 1e-3).flatten(-2) * w
    same(rmsnorm(x, w, None, z=z, eps=1e-3, group_size=4, norm_before_gate=False), gated, [x, z, w])


def test_the_state_space_scans_agree(standin: Any) -> None:
    """Mamba-2 with one channel a head and one state matrix is Mamba with that A in every state."""
    scan = standin("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    dual = standin("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    x, dt, a, d = randn(2, 6, 3), randn(2, 6, 3, seed=1), randn(3), randn(3, seed=5)
    b, c, z, bias = randn(2, 6, 1, 4), randn(2, 6, 1, 4, seed=2), randn(2, 6, 3, seed=3), randn(3, seed=4)
    one = dual(
        x[..., None], dt, -a.exp(), b, c, 64, D=d, z=z[..., None], dt_bias=bias, dt_softplus=True
    )[..., 0]  # fmt: skip
    flat = [m.transpose(1, 2) for m in (x, dt)]
    other = scan(
        *flat, -a.exp()[:, None].expand(3, 4), b[:, :, 0].transpose(1, 2), c[:, :, 0].transpose(1, 2), d,
        z=z.transpose(1, 2), delta_bias=bias, delta_softplus=True,
    ).transpose(1, 2)  # fmt: skip
    same(one, other, [x, dt, a, b, c, d, z, bias])
    # and at one step it is the closed form
    step = F.softplus(dt[:, 0] + bias)
    first = (step * x[:, 0] * (b * c)[:, 0, 0].sum(-1, keepdim=True) + d * x[:, 0]) * F.silu(z[:, 0])
    torch.testing.assert_close(one[:, 0], first)


def test_scaled_products(standin: Any) -> None:
    gemm = standin("deep_gemm")
    a, b = randn(5, 200).detach().float(), randn(130, 200).detach().float()
    out = torch.empty(5, 130)
    pair = gemm.per_token_cast_to_fp8(a), gemm.per_block_cast_to_fp8(b)
    gemm.fp8_gemm_nt(*pair, out)
    assert float((out - a @ b.T).norm() / (a @ b.T).norm()) < 2 * 2**-4  # two operands of three mantissa bits
    torch.testing.assert_close(out, gemm.dequantised(pair[0]) @ gemm.dequantised(pair[1]).T)
    groups, grouped = torch.tensor([0, 0, 1, -1, 1]), torch.zeros(5, 130)
    gemm.m_grouped_bf16_gemm_nt_contiguous(a, torch.stack([b, -b]), grouped, groups)
    signs = torch.tensor([1.0, 1.0, -1.0, 0.0, -1.0])[:, None]
    torch.testing.assert_close(grouped, signs * (a @ b.T))


def test_what_a_standin_does_not_compute_is_refused(standin: Any) -> None:
    x = torch.ones(1, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="safe_gate"):
        standin("fla.ops.kda").chunk_kda(x, x, x, x, x[..., 0], safe_gate=True)
