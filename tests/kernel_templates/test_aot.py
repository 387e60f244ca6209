"""Kernels compile for Hopper, without a GPU, and fit."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

import kernel_templates
from kernel_templates import configs
from kernel_templates.aot import Job, KernelReport, compile_all
from kernel_templates.registry import family_module, spec_class
from onboarding.stages.generate.specialize import specialise

TEMPLATES = Path(kernel_templates.__file__).parent
MAX_SHARED = 227 * 1024  # bytes a program may have on Hopper

FAST = [
    ("norm", {"hidden": 2304, "residual": True}),
    ("norm", {"hidden": 128, "gate": "sigmoid"}),
    ("gated_activation", {"width": 9216}),
    ("gated_activation", {"width": 2880, "layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}),
    ("short_convolution", {"channels": 12288}),
    ("hyper_connection", {"hidden": 4096}),
    ("norm", {"hidden": 4096, "centred": True, "bias": True}),
    ("linear_cross_entropy", {"hidden": 2304, "vocabulary": 163840}),
    ("rotary", {"heads": 32, "key_heads": 4, "head_dim": 128, "rotary_dim": 128, "norm": True}),
    ("routing", {"experts": 256, "top_k": 8, "activation": "sigmoid", "bias": True, "renormalise": True}),
    ("attention_residual", {"hidden": 7168}),
    ("indexer", {"top_k": 2048, "heads": 64, "context": 32768}),
    ("sparse_attention", {"heads": 64, "key_dim": 512, "value_dim": 512, "rope": True, "rope_dim": 64, "top_k": 2048}),
    ("moe", {"experts": 256, "top_k": 8, "hidden": 2304, "intermediate": 1024}),
    ("linear_attention", {"key_heads": 32, "value_heads": 32, "key_dim": 128, "value_dim": 128}),
]
SLOW = [
    ("linear_cross_entropy", {"hidden": 2304, "vocabulary": 163840, "frozen": True, "softcap": 30.0}),
    ("linear_cross_entropy", {"hidden": 2304, "vocabulary": 20480, "reduction": "statistics", "label_smoothing": 0.1}),
    ("linear_cross_entropy", {"hidden": 512, "vocabulary": 32000, "dtype": "float32", "bias": True}),
    ("rotary", {"heads": 128, "key_heads": 1, "head_dim": 64, "rotary_dim": 64, "pairs": "interleaved",
                "angles": "pair", "regrouped": True}),
    ("rotary", {"heads": 16, "key_heads": 2, "head_dim": 256, "rotary_dim": 64, "norm": True, "offset": True}),
    ("routing", {"experts": 896, "top_k": 16, "activation": "sqrt_softplus", "bias": True}),
    ("routing", {"experts": 256, "top_k": 8, "activation": "sigmoid", "bias": True, "groups": 8, "top_groups": 4}),
    ("norm", {"hidden": 16384, "offset": True, "gate": "silu"}),
    ("gated_activation", {"width": 9216, "activation": "gelu", "layout": "concatenated"}),
    ("short_convolution", {"channels": 6144, "bias": True, "states": True}),
    ("hyper_connection", {"hidden": 4096, "rounds": 0, "post": False}),
    ("moe", {"experts": 128, "top_k": 4, "hidden": 2880, "intermediate": 2880, "bias": True, "transposed": True,
             "gate_up_layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}),
    ("linear_attention", {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "decay": "head"}),
    ("linear_attention", {"key_heads": 8, "value_heads": 8, "key_dim": 64, "value_dim": 128, "decay": "none",
                          "delta": False}),
]  # fmt: skip


def _job(family, fields, folder: Path) -> Job:
    """The operator at its own size, with the H200 configuration."""
    spec = spec_class(family)(**fields)
    module = specialise(TEMPLATES / family / "template.py", spec)
    source = folder / f"{family}_{spec.digest()}.py"
    source.write_text(module.source)
    cases = family_module(family, "cases")
    case = cases.cases(spec, random.Random(0), 1, "compiled")[0]
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(0), getattr(torch, spec.dtype), "cpu")
    sizes = family_module(family, "template").bucket(tensors, spec)
    config = configs.choose(configs.load(TEMPLATES / family / "configs"), "nvidia_h200", sizes).config
    shapes = {
        n: None if t is None else (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
    }
    return Job(source=source, tensors=shapes, config=config, label=spec.words(), alone=True)


def _check(reports: list[KernelReport]) -> None:
    for report in reports:
        where = f"{report.label}: {report.phase} {report.kernel}"
        assert not report.error, f"{where}: {report.error}"
        assert 0 < report.registers <= 255, where
        assert report.shared_bytes <= MAX_SHARED, where


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """All fast variants in one process: its start costs as much as a kernel."""
    folder = tmp_path_factory.mktemp("candidates")
    jobs = [_job(family, fields, folder) for family, fields in FAST]
    # the loss where nothing is kept: exponentials are computed twice
    (loss,) = (job for job, (family, _) in zip(jobs, FAST, strict=True) if family == "linear_cross_entropy")
    jobs.append(dataclasses.replace(loss, config=loss.config | {"rows": 65536, "kept": 0}))
    # a misspelt function in one more candidate
    broken = _job("norm", {"hidden": 64}, folder)
    broken.source.write_text(broken.source.read_text().replace("tl.rsqrt(", "tl.no_such_function("))
    return compile_all([*jobs, dataclasses.replace(broken, label="broken")])


def test_every_family_compiles_for_hopper(reports):
    assert {(r.label.split()[0], r.phase) for r in reports if r.label != "broken"} >= {
        (word, phase)
        for word in ("RMSNorm", "silu", "short", "hyper-connection,", "256", "delta")
        for phase in ("forward", "backward")
    }
    _check([r for r in reports if r.label != "broken"])


def test_elementwise_kernels_do_not_spill(reports):
    elementwise = [r for r in reports if r.label.startswith(("RMSNorm", "silu gate"))]
    assert len(elementwise) >= 8
    assert [r.kernel for r in elementwise if r.spill_bytes] == []


def test_loss_rotary_and_routing_do_not_spill(reports):
    """Rows of up to 16384 logits in registers, heads with their norms, rows of 256 scores."""
    mine = [r for r in reports if r.label.startswith(("linear", "rotary", "sigmoid routing", "LayerNorm"))]
    loss = {"_statistics_kernel", "_row_scale_kernel", "_dz_kernel", "_times_kernel", "_loss_kernel"}
    assert loss <= {r.kernel for r in mine}
    assert [(r.label, r.kernel) for r in mine if r.spill_bytes] == []


def test_what_does_not_compile_is_reported(reports):
    found = {r.phase: r for r in reports if r.label == "broken"}
    assert "no_such_function" in found["forward"].error
    assert not found["backward"].error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_variants_compile_for_hopper(tmp_path):
    _check(compile_all([_job(family, fields, tmp_path) for family, fields in SLOW]))
