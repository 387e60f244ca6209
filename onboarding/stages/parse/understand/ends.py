"""What holds for the model as a whole: embedding, head, losses, parameters without gradient, buffers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboarding.architecture import ModelFacts
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.understand.compare import CLOSE
from onboarding.stages.parse.understand.ledger import IDENTITY, Ledger
from onboarding.stages.parse.understand.novel import keep_subgraph
from onboarding.stages.parse.understand.observe import Observation
from onboarding.stages.parse.uses.proof import relative_error

_AUXILIARY = re.compile(r"(aux_loss|z_loss|balance_loss|router_loss|load_balanc|mtp_loss|jitter)")
_PREDICTION = re.compile(r"(^|\.)(mtp|nextn|multi_token)", re.I)


def understand_ends(step: Observation, full: nn.Module, prefix: str, ledger: Ledger) -> ModelFacts:
    """Facts of the whole model, each with its proof."""
    model: Any = step.model
    facts = ModelFacts()
    _embedding(model, step, full, prefix, facts, ledger)
    _head(model, step, facts, ledger)
    _loss(model, step, facts, ledger)
    _gradients(model, step, facts, ledger, prefix)
    facts.fp32_parameters = _patterns(_kept_fp32(full), prefix)
    facts.buffers = _patterns(saved_buffers(full), prefix)
    facts.prediction_heads = len({n for n, _ in full.named_modules() if _PREDICTION.search(n) and n.count(".") <= 2})
    return facts


def _kept_fp32(full: nn.Module) -> list[str]:
    """Parameters that the class makes or keeps in float32, whatever the dtype of the rest."""
    kept: set[str] = set()
    for cls in type(full).__mro__:
        kept.update(vars(cls).get("_keep_in_fp32_modules") or ())
        kept.update(vars(cls).get("_keep_in_fp32_modules_strict") or ())
    named = list(full.named_parameters())
    mixed = any(p.dtype != torch.float32 for _, p in named)
    return [n for n, p in named if (mixed and p.dtype == torch.float32) or any(part in n for part in kept)]


def saved_buffers(model: nn.Module) -> list[str]:
    """Names of buffers that a checkpoint holds."""
    names = {name for name, _ in model.named_buffers()}
    transient = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return sorted(names - transient)


def _patterns(names: Any, prefix: str) -> list[str]:
    """Names with the layer's number as ``*``, each once."""
    return list(dict.fromkeys(re.sub(rf"^{re.escape(prefix)}\.\d+\.", f"{prefix}.*.", name) for name in names))


def _embedding(model: Any, step: Observation, full: Any, prefix: str, facts: ModelFacts, ledger: Ledger) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    facts.tied_embeddings = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    call = next((c for c in step.calls if c.kind == "module" and c.function is embedding), None)
    first = next((c for c in step.calls if c.kind == "module" and c.path == f"{prefix}.0"), None)
    if call is None or first is None or not isinstance(getattr(embedding, "weight", None), Tensor):
        ledger.unproven("embedding", "embedding", "it was not seen to run")
        return
    rows = embedding.weight.detach()[step.ids].double()
    made = call.results()[0].detach().double()
    stream = next(t for t in first.tensors() if t.is_floating_point()).detach().double()
    tied = "tied to the head" if facts.tied_embeddings else "not tied"
    for name, value in (("the stream", stream), ("its output", made)):
        if value.numel() % rows.numel():
            continue
        copies = value.numel() // rows.numel()
        wide = (
            rows
            if copies == 1
            else rows.unsqueeze(-2).expand(*rows.shape[:-1], copies, rows.shape[-1]).reshape(value.shape)
        )
        wide = wide.reshape(value.shape)
        factor = float((value * wide).sum() / wide.pow(2).sum())
        error = relative_error(wide * factor, value)
        if error <= CLOSE:
            facts.embedding_scale = _published_scale(factor, rows.shape[-1], full)
            words = f"embedding {tied}" + (f", x {facts.embedding_scale:g}" if facts.embedding_scale != 1.0 else "")
            where = "" if name == "the stream" else "; more is added or normed before the first layer"
            ledger.claim("embedding", words + where, IDENTITY, error, CLOSE)
            return
    if isinstance(embedding, nn.Embedding) and type(embedding) is not nn.Embedding:
        keep_subgraph(call, "embedding", ledger)
    else:
        ledger.unproven("embedding", f"embedding {tied}", "its output is no multiple of its rows")


def _published_scale(factor: float, width: int, full: Any) -> float:
    """A factor of the twin, or that of the published model where it is the root of the width."""
    if abs(factor - 1) < 1e-5:
        return 1.0
    if abs(factor**2 / width - 1) < 1e-4:
        factor = float(full.get_input_embeddings().weight.shape[-1]) ** 0.5
    return float(f"{factor:.6g}")


def _last_linear(step: Observation, classes: int) -> nn.Linear | None:
    """The linear map to the vocabulary that ran last, where the class does not say which one its head is."""
    modules = (call.function for call in reversed(step.calls) if call.kind == "module")
    return next((m for m in modules if isinstance(m, nn.Linear) and m.out_features == classes), None)


def _head(model: Any, step: Observation, facts: ModelFacts, ledger: Ledger) -> None:
    logits = getattr(step.output, "logits", None)
    if not isinstance(logits, Tensor):
        ledger.unproven("head", "head", "the class gives no logits")
        return
    head = model.get_output_embeddings() or _last_linear(step, int(logits.shape[-1]))
    if head is None:
        ledger.unproven("head", "head", "the class names none, and nothing linear makes its logits")
        return
    call = next((c for c in reversed(step.calls) if c.kind == "module" and c.function is head), None)
    if call is None:
        ledger.unproven("head", "head", "it was not seen to run")
        return
    made, logits = call.results()[0].detach().double(), logits.detach().double()
    x, weight = call.tensors()[0].detach().double(), head.weight.detach().double()
    bias = head.bias.detach().double() if getattr(head, "bias", None) is not None else None
    plain = F.linear(x, weight, bias)
    error = relative_error(made, plain)
    if error > CLOSE:
        keep_subgraph(call, "head", ledger)
    factor = float((logits * made).sum() / made.pow(2).sum())
    if relative_error(made * factor, logits) <= CLOSE:
        facts.logit_scale = 1.0 if abs(factor - 1) < 1e-5 else float(f"{factor:.6g}")
        words = "logits: linear" + (f", x {facts.logit_scale:g}" if facts.logit_scale != 1.0 else "")
        ledger.claim("head", words, IDENTITY, max(relative_error(made * factor, logits), min(error, CLOSE)), CLOSE)
        return
    numbers = _floats(model.config.get_text_config())
    made, logits = made.flatten(0, -2)[-16:, :512], logits.flatten(0, -2)[-16:, :512]
    tried = [
        (relative_error(cap * torch.tanh(made * scale / cap), logits), cap, scale)
        for cap in numbers
        for scale in (1.0, *(n for n in numbers if n < 100))
    ]
    error, cap, scale = min(tried, default=(float("inf"), 0.0, 1.0))
    if error <= CLOSE:
        facts.logit_softcap, facts.logit_scale = cap, float(f"{scale:.6g}")
        ledger.claim("head", f"logits: softcap {cap:g}", IDENTITY, error, CLOSE)
        return
    ledger.unproven("head", "head", "logits are neither scaled nor capped outputs of the head")


def _floats(config: Any) -> list[float]:
    return [
        float(v)
        for v in vars(config).values()
        if isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e4
    ]


def _loss(model: Any, step: Observation, facts: ModelFacts, ledger: Ledger) -> None:
    """The training loss against cross-entropy of shifted logits; what is left is an auxiliary loss."""
    with quiet(), torch.no_grad():
        try:
            output = model(**{**step.given, "labels": step.ids})
        except Exception as failure:
            ledger.unproven("loss", "training loss", f"{type(failure).__name__}: {failure}"[:160])
            return
    if getattr(output, "loss", None) is None or not isinstance(getattr(output, "logits", None), Tensor):
        ledger.unproven("loss", "training loss", "the class gives none")
        return
    logits = output.logits.float()
    if logits.shape[:-1] != step.ids.shape:
        ledger.unproven("loss", "training loss", f"logits {list(logits.shape)} for {list(step.ids.shape)} tokens")
        return
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), step.ids[:, 1:].flatten())
    left = float(output.loss - plain)
    settings = {n: v for n, v in vars(model.config.get_text_config()).items() if _AUXILIARY.search(n) and v}
    error = abs(left) / max(abs(float(plain)), 1e-6)
    if error <= CLOSE:
        off = [f"{n} = {v:g}" for n, v in settings.items() if isinstance(v, float | int) and not isinstance(v, bool)]
        facts.auxiliary_losses = [f"{o} (off by default)" for o in off]
        words = "loss: cross-entropy alone" + (f"; {', '.join(off)} does not reach it by default" if off else "")
        ledger.claim("loss", words, "its value against cross-entropy of the shifted logits", error, CLOSE)
        _auxiliary_on(model, step, facts, ledger)
        return
    unshifted = F.cross_entropy(logits.flatten(0, 1), step.ids.flatten())
    if abs(float(output.loss - unshifted)) <= CLOSE * float(unshifted):
        words = "loss: cross-entropy of each position with its own label (the class does not shift)"
        error = abs(float(output.loss - unshifted)) / float(unshifted)
        ledger.claim("loss", words, "its value against cross-entropy of the logits", error, CLOSE)
        return
    auxiliary = getattr(output, "aux_loss", None)
    coefficient = _coefficient(left, auxiliary, settings)
    if coefficient is not None:
        facts.auxiliary_losses = [f"{coefficient} (on by default)"]
        ledger.claim("loss", f"loss: cross-entropy + {coefficient}", "its value against both terms", 0.0, CLOSE)
    else:
        ledger.unproven("loss", "training loss", f"it differs from cross-entropy by {left:.2e}")


def _auxiliary_on(model: Any, step: Observation, facts: ModelFacts, ledger: Ledger) -> None:
    """With router logits asked for, does the auxiliary loss join?"""
    if not facts.auxiliary_losses:
        return
    with quiet(), torch.no_grad():
        try:
            output = model(**{**step.given, "labels": step.ids, "output_router_logits": True})
            logits = output.logits.float()
        except Exception:
            return
    auxiliary = getattr(output, "aux_loss", None)
    if not isinstance(auxiliary, Tensor):
        return
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), step.ids[:, 1:].flatten())
    left = float(output.loss - plain)
    settings = {n: v for n, v in vars(model.config.get_text_config()).items() if _AUXILIARY.search(n) and v}
    coefficient = _coefficient(left, auxiliary, settings)
    if coefficient is not None:
        facts.auxiliary_losses = [f"{coefficient} (with output_router_logits)"]
        ledger.claim("loss", f"with output_router_logits: + {coefficient}", "its value against both terms", 0.0, CLOSE)


def _coefficient(left: float, auxiliary: Any, settings: dict[str, Any]) -> str | None:
    if not isinstance(auxiliary, Tensor):
        return None
    for name, value in settings.items():
        if isinstance(value, int | float) and abs(float(auxiliary) * value - left) <= 1e-3 * abs(left) + 1e-6:
            return f"{name} {value:g} x load-balancing loss"
    return None


def _gradients(model: Any, step: Observation, facts: ModelFacts, ledger: Ledger, prefix: str) -> None:
    """Parameters that the loss does not reach. Experts that no token chose are told apart by who owns them."""
    logits = getattr(step.output, "logits", None)
    if not isinstance(logits, Tensor) or not logits.requires_grad:
        ledger.unproven("parameters", "gradients", "no loss to differentiate")
        return
    if logits.shape[:-1] == step.ids.shape:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), step.ids[:, 1:].flatten())
    else:  # logits of another length: whatever is made of them, the same parameters are reached
        loss = logits.float().square().mean()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, allow_unused=True)
    ran = {c.path for c in step.calls if c.kind == "module"}
    without = []
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is not None and bool((gradient != 0).any()):
            continue
        owner = name.rpartition(".")[0]
        if owner in ran or any(path.startswith(owner + ".") for path in ran) or not _beside(owner, ran):
            without.append(name)
    inside = [n for n in without if n.startswith(prefix + ".")]
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    facts.without_gradient = _patterns([*inside, *frozen], prefix)
    words = "every parameter of the decoder gets a gradient"
    if facts.without_gradient:
        words = f"no gradient reaches {', '.join(facts.without_gradient[:8])}"
        words += f" and {len(facts.without_gradient) - 8} more" if len(facts.without_gradient) > 8 else ""
    ledger.claim("parameters", words, "backward of the loss", 0.0, 0.0)


def _beside(owner: str, ran: set[str]) -> bool:
    """A module that did not run though its siblings did: an expert that no token chose."""
    parent = owner.rpartition(".")[0]
    return any(path == parent or path.startswith(parent + ".") for path in ran)
