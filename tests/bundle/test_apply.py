"""apply(): every hook equals the model's own code, forward and gradients; and nothing leaks."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onboarding.stages.package.bundle_files.apply import KernelRefused, apply
from onboarding.twin import build, derive
from tests.align.torch_candidates import entry, write_bundle

PUBLISHED = Path(__file__).parents[2] / "examples"
MODELING = "transformers.models.{0}.modeling_{0}:{1}"


def binding(hook: str, model: str, cls: str, **more: Any) -> dict[str, Any]:
    return {"hook": hook, "target": MODELING.format(model, cls), **more}


NORM = {"family": "norm", "hidden": 2304, "eps": 1e-5}
KIMI = [
    (NORM, [binding("norm", "kimi_linear", "KimiLinearRMSNorm")]),
    ({**NORM, "hidden": 128, "gate": "sigmoid"}, [binding("gated_norm", "kimi_linear", "KimiLinearRMSNormGated")]),
    ({"family": "gated_activation", "width": 9216}, [binding("gated_mlp", "kimi_linear", "KimiLinearMLP")]),
    (
        {"family": "moe", "experts": 256, "top_k": 8, "hidden": 2304, "intermediate": 1024},
        [binding("experts", "kimi_linear", "KimiLinearExperts")],
    ),
    (
        {"family": "short_convolution", "channels": 12288},
        [binding("short_convolution", "kimi_linear", "KimiLinearDeltaAttention", function="causal_conv1d_fn")],
    ),
    (
        {"family": "linear_attention", "key_heads": 32, "value_heads": 32, "key_dim": 128, "value_dim": 128},
        [binding("linear_attention", "kimi_linear", "KimiLinearDeltaAttention", function="chunk_kimi_delta_attention")],
    ),
]


@pytest.fixture(autouse=True)
def _modeling_modules_as_they_were() -> Iterator[None]:
    """Tests that leave a model patched leave its dispatcher behind: harmless to others, but parse would look at it."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models."):
            for attribute, value in list(vars(module).items()):
                if type(value).__name__ == "Dispatcher":
                    setattr(module, attribute, value.original)


@pytest.fixture(scope="module")
def kimi() -> Any:
    config = json.loads((PUBLISHED / "kimi-linear" / "config.json").read_text())
    return derive(config, layers_at_least=2, sequence_length=32)


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(2 * 32).reshape(2, 32) * 37 % 256
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model: nn.Module, expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    loss, grads = step(model)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        reference = expected[1][name]
        assert (grad - reference).norm() <= 2e-4 * reference.norm() + 1e-7, name


@pytest.mark.parametrize("which", range(len(KIMI)), ids=[b[0]["hook"] for _, b in KIMI])
def test_each_hook_equals_the_model_and_is_removed(which: int, kimi: Any, tmp_path: Path) -> None:
    spec, bindings = KIMI[which]
    bundle = write_bundle(tmp_path, [entry(spec, bindings)])
    model = build(kimi)
    names = list(model.state_dict())
    expected = step(model)
    applied = apply(model, bundle=bundle, verify=False)
    assert_same_step(model, expected)
    (digest,) = applied.swapped
    target = bindings[0]["target"].rpartition(":")[2]
    of_class = [n for n, m in model.named_modules() if type(m).__name__ == target]
    assert set(applied.swapped[digest]) | set(applied.skipped) == set(of_class)
    assert applied.ran() == {digest: len(applied.swapped[digest])}
    assert not applied.fallbacks
    assert list(model.state_dict()) == names

    applied.remove()
    before = copy.deepcopy(applied.calls)
    assert step(model)[0] == expected[0]
    assert applied.calls == before


def test_all_hooks_at_once_with_gradient_checkpointing_and_a_deep_copy(kimi: Any, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, [entry(spec, bindings) for spec, bindings in KIMI])
    model = build(kimi)
    expected = step(model)
    applied = apply(model, bundle=bundle, verify=False)
    assert len(applied.swapped) == len(KIMI)
    assert_same_step(model, expected)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_step(twin, expected)  # the copy computes with its own weights
    twin.activation_checkpointing_enable()  # type: ignore[operator]
    assert_same_step(twin, expected)


def test_a_second_model_of_the_same_class_is_untouched(kimi: Any, tmp_path: Path) -> None:
    wrong = [entry(KIMI[-1][0], KIMI[-1][1], decay_share=0.0), entry(KIMI[0][0], KIMI[0][1], eps=0.5)]
    bundle = write_bundle(tmp_path, wrong)
    patched, other = build(kimi), build(kimi)
    expected = step(other)
    applied = apply(patched, bundle=bundle, verify=False)
    assert abs(step(patched)[0] - expected[0]) > 1e-3
    assert step(other)[0] == expected[0]
    applied.remove()
    assert step(patched)[0] == expected[0]


def test_decoding_with_a_cache_gives_the_same_tokens(kimi: Any, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, [entry(spec, bindings) for spec, bindings in KIMI])
    model: Any = build(kimi).eval()
    prompt = torch.arange(20)[None] * 11 % 256

    def generated() -> list[int]:
        out = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        return list(out[0].tolist())

    expected = generated()
    apply(model, bundle=bundle, verify=False)
    assert generated() == expected


def test_a_module_that_is_not_the_spec_is_left_alone(kimi: Any, tmp_path: Path) -> None:
    spec = {**NORM, "eps": 1e-3}
    gelu = {"family": "gated_activation", "width": 9216, "activation": "gelu"}
    bundle = write_bundle(tmp_path, [entry(spec, KIMI[0][1]), entry(gelu, KIMI[2][1])])
    model = build(kimi)
    expected = step(model)
    applied = apply(model, bundle=bundle, verify=False)
    assert not applied.swapped
    assert any("eps" in reason for reason in applied.skipped.values())
    assert any("not gelu" in reason for reason in applied.skipped.values())
    assert step(model)[0] == expected[0]


def test_uncovered_dtypes_run_the_models_own_code(kimi: Any, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, [entry(spec, bindings) for spec, bindings in KIMI])
    model = build(kimi, dtype=torch.float64)
    applied = apply(model, bundle=bundle, verify=False)
    loss, _ = step(model)
    applied.remove()
    assert step(model)[0] == loss
    assert any("float64" in reason for reason in applied.fallbacks.values())


def test_only_chooses_kernels(kimi: Any, tmp_path: Path) -> None:
    entries = [entry(spec, bindings) for spec, bindings in KIMI]
    bundle = write_bundle(tmp_path, entries)
    applied = apply(build(kimi), bundle=bundle, verify=False, only=[entries[3].digest])
    assert list(applied.swapped) == [entries[3].digest]


def test_the_kernel_of_the_nearest_size_is_taken_unless_a_place_is_named(kimi: Any, tmp_path: Path) -> None:
    latent = {**NORM, "hidden": 512, "eps": 1e-6}
    block = {**NORM, "hidden": 2304}
    far = {**NORM, "hidden": 1 << 20}
    norm = KIMI[0][1][0]
    entries = [
        entry(far, [{**norm, "module_paths": ["model.layers.26.input_layernorm"]}]),
        entry(block, [{**norm, "module_paths": ["model.layers.26.post_attention_layernorm", "model.norm"]}]),
        entry(latent, [{**norm, "module_paths": ["model.layers.3.self_attn.kv_a_layernorm"]}]),
    ]
    applied = apply(build(kimi), bundle=write_bundle(tmp_path, entries), verify=False)
    names: Callable[[int], set[str]] = lambda i: {n.rpartition(".")[2] for n in applied.swapped[entries[i].digest]}  # noqa: E731
    assert names(0) == {"input_layernorm"}
    assert names(1) == {"post_attention_layernorm", "norm"}
    assert names(2) == {"kv_a_layernorm"}


def test_a_tampered_bundle_is_refused_before_its_code_runs(
    kimi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onboarding.stages.package.signing import sign_folder, signing_key

    bundle = write_bundle(tmp_path / "bundle", [entry(*KIMI[0])])
    key, _ = sign_folder(bundle, signing_key(tmp_path / "key"))
    model = build(kimi)
    apply(model, bundle=bundle, trusted_key=key).remove()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(Exception, match=f"signing key {key} is unknown here"):
        apply(model, bundle=bundle)
    (tmp_path / "onboard").mkdir()
    (tmp_path / "onboard" / "trusted_keys").write_text(f"{key}  the service\n")
    apply(model, bundle=bundle).remove()
    kernel = next(bundle.rglob("_kernel.py"))
    kernel.write_text("raise SystemExit('it ran')\n")
    with pytest.raises(Exception, match="was changed after signing"):
        apply(model, bundle=bundle)


def test_the_interpreter_can_be_forbidden(kimi: Any, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, [entry(*KIMI[0])])
    with pytest.raises(KernelRefused, match="interpreter is not allowed"):
        apply(build(kimi), bundle=bundle, verify=False, allow_interpreter=False)


def test_a_gpu_needs_a_compiled_verdict_for_this_very_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from onboarding.stages.package.bundle_files import apply as module

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    here = {"level": "compiled", "device": "nvidia_h200", "triton": triton.__version__}
    gpu = torch.device("cuda")
    module._permit({"name": "k", "verified": [here]}, gpu, None, False)
    for bad in ({"level": "interpreted"}, {"device": "NVIDIA A100"}, {"triton": "0.0"}):
        unproven = {"name": "k", "verified": [{**here, **bad}]}
        with pytest.raises(KernelRefused, match="judge it here first"):
            module._permit(unproven, gpu, None, False)
        module._permit(unproven, gpu, None, True)
