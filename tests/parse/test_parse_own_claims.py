"""Claims about losses, rotary functions and routers: honest ones are proven, near misses are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from onboarding.stages.parse.rotary import RotaryCall, rotary_functions
from onboarding.stages.parse.uses.loss import prove_loss
from onboarding.stages.parse.uses.rotary import prove_rotary
from onboarding.stages.parse.uses.routing import prove_routing

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 90, "pad_token_id": 0}  # fmt: skip


# ---- losses ----------------------------------------------------------------------------------------------------


def model_of(name: str, **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **SMALL, **more))


@pytest.mark.parametrize(
    ("name", "more", "scale", "cap"),
    [
        ("llama", {}, 1.0, None),
        ("gemma2", {"final_logit_softcapping": 12.5}, 1.0, 12.5),
        ("cohere", {"logit_scale": 0.0625}, 0.0625, None),
        ("granite", {"logits_scaling": 8.0}, 0.125, None),
    ],
)
def test_scale_and_cap_are_read_off_the_logits(
    name: str, more: dict[str, Any], scale: float, cap: float | None
) -> None:
    proven = prove_loss(model_of(name, **more), "model", "bfloat16")
    assert proven is not None
    assert proven.head == "lm_head"
    assert (proven.spec.hidden, proven.spec.vocabulary) == (32, 90)
    assert (proven.spec.logit_scale, proven.spec.softcap) == (scale, cap)


def not_shifted(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return F.cross_entropy(logits.view(-1, vocab_size), target, label_smoothing=0.01)


def with_an_extra(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return F.cross_entropy(logits.view(-1, vocab_size), target) + 1e-3 * logits.square().mean()


@pytest.mark.parametrize("loss", [not_shifted, smoothed, with_an_extra])
def test_another_loss_is_not_bound(loss: Any) -> None:
    model = model_of("llama")
    model.loss_function = loss
    assert prove_loss(model, "model", "bfloat16") is None


# ---- rotary functions ------------------------------------------------------------------------------------------


def call_of(function: Any, turned: int = 16) -> RotaryCall:
    shapes = {"q": (1, 4, 9, 16), "k": (1, 2, 9, 16), "cos": (1, 9, turned)}
    return RotaryCall(path="a", attribute="f", function=function, shapes=shapes, dtype="torch.bfloat16", options={})


def rotary(sign: float = 1.0, swapped: bool = False) -> Any:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            half = torch.cat([b, -a] if swapped else [-b, a], dim=-1)
            return x * cos + sign * half * sin

        return turn(q), turn(k)

    return function


def test_a_rotary_function_is_proven_and_its_reverse_is_not() -> None:
    proven = prove_rotary(call_of(rotary()), "bfloat16")
    assert proven is not None
    assert (proven.pairs, proven.angles, proven.heads, proven.key_heads) == ("half", "channel", 4, 2)
    assert prove_rotary(call_of(rotary(sign=-1.0)), "bfloat16") is None
    assert prove_rotary(call_of(rotary(swapped=True)), "bfloat16") is None
    assert prove_rotary(call_of(rotary(sign=1.001)), "bfloat16") is None


def test_only_functions_of_angles_are_looked_at() -> None:
    from transformers.models.llama import modeling_llama

    assert list(rotary_functions(modeling_llama)) == ["apply_rotary_pos_emb"]


# ---- routers ---------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Sigmoid scores, a bias for the choice, renormalised."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 3
        self.weight = nn.Parameter(torch.randn(12, 20))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(12))

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def weights(self, scores: Tensor, index: Tensor) -> Tensor:
        chosen = scores.gather(1, index)
        return 2.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, x.shape[-1]).float(), self.weight.float())
        scores = self.scores(logits)
        index = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False).indices
        return logits, self.weights(scores, index), index


class Biased(Router):
    """The bias weighs as well."""

    def weights(self, scores: Tensor, index: Tensor) -> Tensor:
        return super().weights(scores + self.e_score_correction_bias, index)


class Tempered(Router):
    def scores(self, logits: Tensor) -> Tensor:
        return (1.1 * logits).sigmoid()


class Detached(Router):
    """Right choice, no gradient."""

    def weights(self, scores: Tensor, index: Tensor) -> Tensor:
        return super().weights(scores.detach(), index) + 0.0 * scores.sum()


def test_a_router_is_proven_and_near_misses_are_not() -> None:
    proven = prove_routing(Router(), 20, "bfloat16")
    assert proven is not None
    spec = proven.spec
    assert (spec.activation, spec.bias, spec.renormalise, spec.scale) == ("sigmoid", True, True, 2.5)
    assert (spec.experts, spec.top_k, spec.dtype) == (12, 3, "float32")
    assert proven.attributes == {
        "weight": "weight", "bias": "e_score_correction_bias", "returns": "logits scores index",
    }  # fmt: skip
    for twisted in (Biased, Tempered, Detached):
        assert prove_routing(twisted(), 20, "bfloat16") is None, twisted.__name__
