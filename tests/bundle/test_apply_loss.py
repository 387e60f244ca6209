"""The loss hook: a model's own forward, with a loss that never has logits, and logits for whoever asks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernel_templates import interpreter
from kernel_templates.linear_cross_entropy.spec import Spec
from onboarding.stages.generate.specialize import specialise
from onboarding.stages.package.bundle_files.apply import apply
from onboarding.stages.package.layout import TEMPLATES, KernelEntry, write_kernels

TARGET = "transformers.models.{0}.modeling_{0}:{1}"


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not torch.cuda.is_available():
        interpreter.activate()


def bundle(folder: Path, spec: Spec, target: str) -> Path:
    """A bundle with one linear cross-entropy."""
    source = specialise(TEMPLATES / spec.family / "template.py", spec).source
    binding = {"hook": spec.family, "target": target, "attributes": {"head": "lm_head"}, "module_paths": [""]}
    kernel = KernelEntry(
        digest=spec.digest(),
        spec=spec.to_dict(),
        words=spec.words(),
        source=source,
        bindings=[binding],
        verified=[],
    )
    (folder / "bundle.json").write_text(json.dumps({"kernels": write_kernels(folder, [kernel])}))
    return folder


def tiny(name: str, **more: Any) -> Any:
    """A model of two small layers in fp32."""
    import transformers

    config = transformers.AutoConfig.for_model(
        name, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=90, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}, {}),
    "tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}, {"softcap": 3.0}),
    "cohere": ("cohere", "CohereForCausalLM", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "granite": ("granite", "GraniteForCausalLM", {"logits_scaling": 4.0}, {"logit_scale": 0.25}),
}


def batch() -> dict[str, Tensor]:
    ids = torch.arange(2 * 17).reshape(2, 17) * 37 % 90
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**batch(), use_cache=False, **more)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("count", [None, 40])
def test_the_loss_is_the_models_own(which: str, count: int | None, tmp_path: Path) -> None:
    name, cls, config, flags = MODELS[which]
    model = tiny(name, **config)
    more: dict[str, Any] = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    expected, gradients = step(model, **more)
    spec = Spec(hidden=32, vocabulary=90, dtype="float32", **flags)
    applied = apply(model, bundle=bundle(tmp_path, spec, TARGET.format(name, cls)), verify=False)
    output, found = step(model, **more)
    assert applied.calls == {spec.digest(): {"": 1}}
    assert not applied.fallbacks
    assert not applied.skipped
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert found.keys() == gradients.keys()
    for parameter in found:
        torch.testing.assert_close(found[parameter], gradients[parameter], rtol=2e-4, atol=1e-6)
    # who looks at the logits gets them
    assert output.logits.shape == expected.logits.shape
    torch.testing.assert_close(output.logits + 0, expected.logits)
    torch.testing.assert_close(output.logits.argmax(-1), expected.logits.argmax(-1))

    applied.remove()
    again, _ = step(model, **more)
    assert type(again.logits) is Tensor
    assert again.loss == expected.loss
    assert "_loss_function" not in model.__dict__


def test_no_logits_are_made(tmp_path: Path) -> None:
    """Nothing of the logits' size exists in forward or backward."""
    model = tiny("llama")
    spec = Spec(hidden=32, vocabulary=90, dtype="float32")
    apply(model, bundle=bundle(tmp_path, spec, TARGET.format("llama", "LlamaForCausalLM")), verify=False)
    loss = model(**batch(), use_cache=False)
    assert not loss.logits.computed
    loss.loss.backward()
    assert not loss.logits.computed


def test_generation_and_evaluation_have_ordinary_logits(tmp_path: Path) -> None:
    model = tiny("llama")
    ids = batch()["input_ids"]
    expected = model(input_ids=ids).logits
    spec = Spec(hidden=32, vocabulary=90, dtype="float32")
    apply(model, bundle=bundle(tmp_path, spec, TARGET.format("llama", "LlamaForCausalLM")), verify=False)
    found = model(input_ids=ids).logits
    assert type(found) is Tensor
    assert torch.equal(found, expected)
    with torch.no_grad():
        evaluated = model(**batch())
    assert evaluated.loss.grad_fn is None


@pytest.mark.parametrize("change", ["head", "logits", "loss", "cap"])
def test_what_the_kernel_does_not_compute_runs_the_models_own_code(change: str, tmp_path: Path) -> None:
    name, cls, config, flags = MODELS["gemma2" if change == "cap" else "llama"]
    model = tiny(name, **config)
    if change == "head":

        class Adapted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        model.lm_head.__class__ = Adapted
    if change == "logits":
        # a forward of its own that writes into the logits
        model.lm_head.register_forward_hook(lambda module, args, output: output.mul_(0.5))
    if change == "loss":
        own = model.loss_function
        model.loss_function = lambda *args, **kwargs: 3 * own(*args, **kwargs)
    expected, gradients = step(model)
    spec = Spec(hidden=32, vocabulary=90, dtype="float32", **(flags | ({"softcap": 5.0} if change == "cap" else {})))
    applied = apply(model, bundle=bundle(tmp_path, spec, TARGET.format(name, cls)), verify=False)
    output, found = step(model)
    assert not applied.calls
    assert applied.fallbacks or applied.skipped
    torch.testing.assert_close(output.loss, expected.loss)
    for parameter in found:
        torch.testing.assert_close(found[parameter], gradients[parameter], rtol=1e-4, atol=1e-6)


def test_a_deep_copy_trains_itself(tmp_path: Path) -> None:
    model = tiny("llama")
    spec = Spec(hidden=32, vocabulary=90, dtype="float32")
    apply(model, bundle=bundle(tmp_path, spec, TARGET.format("llama", "LlamaForCausalLM")), verify=False)
    twin = copy.deepcopy(model)
    model.zero_grad()
    twin(**batch(), use_cache=False).loss.backward()
    assert model.lm_head.weight.grad is None
    assert twin.lm_head.weight.grad is not None
