"""The head and the loss of a causal language model: one operator, proven on the class's own forward."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernel_templates.linear_cross_entropy.spec import Spec
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import same_function

IGNORED = -100
_HIDDEN, _CLASSES, _TOKENS = 24, 50, 12


@dataclass(frozen=True, kw_only=True)
class ProvenLoss:
    """A proven head with its loss."""

    spec: Spec
    head: str
    """Name of the head in the model."""


class _Answer:
    """What a decoder returns, as far as a head reads it: hidden states first, everything else None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index in (0, "last_hidden_state") else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Decoder(nn.Module):
    """Stands for the model under the head, and for any part of it that a forward calls by itself."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> _Answer:
        return _Answer(self.hidden)

    def __getattr__(self, name: str) -> Any:
        return self if name in ("decoder", "language_model", "text_model") else super().__getattr__(name)


class _Head(nn.Module):
    """Gives fixed logits, whatever it reads: the operator starts with what the head is given."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.weight = torch.zeros(logits.shape[-1], _HIDDEN, dtype=logits.dtype)  # some read its dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def prove_loss(model: Any, decoder_prefix: str, dtype: str) -> ProvenLoss | None:
    """The linear cross-entropy that a model's head and loss function compute, or None.

    Scale and cap are read off the logits that the class's forward returns for fixed ones; then its loss, with a small
    head and a vocabulary of its own, is compared with the reference, gradients as well.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = [name for name, child in model.named_children() if child is head]
    if not names or type(head) is not nn.Linear or not hasattr(model, "loss_function"):
        return None
    try:
        small = _SmallModel(model, decoder_prefix.split(".")[0], names[0])
        scale, cap = small.probe()
    except Exception:  # a forward of another convention
        return None
    classes, hidden = head.weight.shape
    spec = Spec(
        hidden=hidden, vocabulary=classes, bias=head.bias is not None, logit_scale=scale, softcap=cap, dtype=dtype
    )
    return ProvenLoss(spec=spec, head=names[0]) if _proven(small, spec) else None


class _SmallModel:
    """The class's own forward over a decoder that gives fixed states and a head that gives fixed logits."""

    def __init__(self, model: Any, decoder: str, head: str) -> None:
        bare = copy.copy(model)
        bare.__dict__["_modules"] = {}
        classes = model.get_submodule(head).weight.shape[0]
        self.model = small_instance(bare, {classes: _CLASSES}, torch.Generator())
        config = copy.deepcopy(model.config)
        for part in (config, config.get_text_config()):
            if getattr(part, "vocab_size", None) == classes:
                part.vocab_size = _CLASSES
        self.model.__dict__["config"] = config
        self.decoder, self.head = decoder, head

    def run(self, logits: torch.Tensor, labels: torch.Tensor | None) -> Any:
        """The class's output for logits [1, T, V]."""
        modules = self.model.__dict__["_modules"]
        modules[self.decoder] = _Decoder(torch.zeros(1, logits.shape[1], _HIDDEN, dtype=logits.dtype))
        modules[self.head] = _Head(logits)
        ids = torch.zeros(1, logits.shape[1], dtype=torch.int64)
        with quiet():
            return self.model(input_ids=ids, labels=labels, use_cache=False)

    def probe(self) -> tuple[float, float | None]:
        """Scale and cap of what happens to logits: the slope at zero, and what a huge logit becomes."""
        values = torch.zeros(1, _TOKENS, _CLASSES, dtype=torch.float64)
        values[0, 0, :3] = torch.tensor([1e-4, 1e9, -1e9], dtype=torch.float64)
        found = self.run(values, None).logits[0, 0].double()
        # six digits: constants of a configuration have no more, and some paths go through fp32
        scale = float(f"{float(found[0]) / 1e-4:.6g}")
        huge, low = float(found[1]), float(found[2])
        cap = float(f"{huge:.6g}") if abs(huge + low) < 1e-3 * abs(huge) and huge < 1e6 else None
        return scale, cap


def _proven(small: _SmallModel, spec: Spec) -> bool:
    generator = torch.Generator().manual_seed(23)
    target = torch.randint(0, _CLASSES, (_TOKENS,), generator=generator)
    target[3] = target[-1] = IGNORED
    # labels stand one place later than what they are targets of
    labels = torch.cat([torch.zeros(1, dtype=torch.int64), target[:-1]])[None]
    reach = (spec.softcap or 4.0) / abs(spec.logit_scale)
    tensors: dict[str, torch.Tensor | None] = {
        "x": torch.randn(_TOKENS, _HIDDEN, generator=generator),
        "weight": torch.randn(_CLASSES, _HIDDEN, generator=generator) * (reach / _HIDDEN**0.5),
        "target": target,
    }
    if spec.bias:
        tensors["bias"] = torch.randn(_CLASSES, generator=generator) * reach

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        x, weight = given["x"], given["weight"]
        assert x is not None
        assert weight is not None
        loss: torch.Tensor = small.run(F.linear(x, weight, given.get("bias"))[None], labels).loss
        return {"loss": loss}

    return same_function(run, spec.resized(hidden=_HIDDEN, vocabulary=_CLASSES), tensors)
