"""The stage end to end on Kimi-Linear's twin: right kernels align, planted faults are found by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kernel_templates
from kernel_templates.registry import load_spec
from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.settings import Settings
from onboarding.stages.align.result import AlignResult
from onboarding.stages.align.stage import run
from onboarding.stages.generate.specialize import specialise
from tests.align.torch_candidates import source

CONFIG = Path(__file__).parents[2] / "examples" / "kimi-linear" / "config.json"
MODELING = "transformers.models.kimi_linear.modeling_kimi_linear:"
NORM = {"family": "norm", "hidden": 2304, "eps": 1e-5}
OPERATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm": (NORM, {"hook": "norm", "target": MODELING + "KimiLinearRMSNorm"}),
    "gated_norm": (
        {**NORM, "hidden": 128, "gate": "sigmoid"},
        {"hook": "gated_norm", "target": MODELING + "KimiLinearRMSNormGated"},
    ),
    "mlp": ({"family": "gated_activation", "width": 9216}, {"hook": "gated_mlp", "target": MODELING + "KimiLinearMLP"}),
    "experts": (
        {"family": "moe", "experts": 256, "top_k": 8, "hidden": 2304, "intermediate": 1024},
        {"hook": "experts", "target": MODELING + "KimiLinearExperts"},
    ),
    "kda": (
        {"family": "linear_attention", "key_heads": 32, "value_heads": 32, "key_dim": 128, "value_dim": 128},
        {
            "hook": "linear_attention",
            "target": MODELING + "KimiLinearDeltaAttention",
            "function": "chunk_kimi_delta_attention",
        },
    ),
}
DIGESTS = {name: load_spec(spec).digest() for name, (spec, _) in OPERATORS.items()}


def context(
    tmp_path: Path, sources: dict[str, str], *, tuned: bool = True, **step_input: Any
) -> tuple[StageContext, list[dict[str, Any]]]:
    """A job whose upstream stages have finished with these candidates, all accepted."""
    store = ArtifactStore((tmp_path / "artifacts").as_uri())
    specs = {name: load_spec(OPERATORS[name][0]) for name in sources}
    uses = [
        {
            "digest": spec.digest(),
            "spec": spec.to_dict(),
            "words": spec.words(),
            "role": name,
            "bindings": [OPERATORS[name][1]],
            "calls": 1,
            "flops": 1.0,
            "bytes_moved": 1.0,
        }
        for name, spec in specs.items()
    ]
    block = {"letter": "K", "mixer": "KDA", "feed_forward": "dense", "layers": [0, 1, 2], "parameters": 1}
    block |= {"active_parameters": 1, "flops": 1, "bytes_moved": 1}
    block |= {"sequence_dependent": True, "sparse_memory_access": False}
    results: dict[tuple[str, str], dict[str, Any]] = {}
    definition = store.put(b"-", name="definition.tar", media_type="application/x-tar").model_dump()
    config = json.loads(CONFIG.read_text())
    results["intake", ""] = {
        "name": "kimi", "model_type": "kimi_linear", "source": "config", "digest": "0", "definition": definition,
        "config": config, "files": [], "has_code": False, "has_tokenizer": False,
    }  # fmt: skip
    architecture = {
        "name": "kimi", "model_type": "kimi_linear", "class_name": "KimiLinearForCausalLM", "sequence_length": 8192,
        "hidden_size": 2304, "vocab_size": 163840, "num_layers": 27, "strip": "K", "blocks": [block],
        "census": {"total": 1, "active": 1, "by_role": {}, "tied_embeddings": False, "fp32_parameters": 0},
        "graph": [], "uses": uses,
    }  # fmt: skip
    results["parse", ""] = {"architecture": architecture, "seconds": 0}
    digests = [spec.digest() for spec in specs.values()]
    results["gaps", ""] = {"target": "h200", "sequence_length": 8192, "rows": [], "gaps": digests, "step_ms": 1.0}
    for name, spec in specs.items():
        candidate = store.put(sources[name].encode(), name=f"{name}.py", media_type="text/x-python").model_dump()
        results["generate", spec.digest()] = {
            "spec": spec.to_dict(), "words": spec.words(), "candidate": candidate, "template": "t", "lines": 1,
            "kernels": [], "entry": {},
        }  # fmt: skip
        results["judge", spec.digest()] = {
            "outcome": "accepted", "spec": spec.to_dict(), "candidate": candidate["digest"], "level": "interpreted",
            "device": "cpu", "triton": "3.6.0", "torch": "2.13", "seed": 1, "cases": [], "worst_share": 0.1,
            "worst_where": "y", "sandbox": "none",
        }  # fmt: skip
    if tuned:  # torch candidates take any configuration; generated ones those of their family
        results |= {("tune", d): {"device": "interpreter", "rows": [_row()], "seconds": 0.0} for d in digests}
    events: list[dict[str, Any]] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = StageContext(
        job_id="job",
        job_name="kimi",
        stage="align",
        key="",
        attempt=1,
        options=JobOptions(profile="quick", device="cpu"),
        profile=PROFILES["quick"].model_copy(update={"sequence_length": 32, "train_steps": 3}),
        settings=Settings(home=tmp_path),
        scratch=scratch,
        artifacts=store,
        policy=RulePolicy(),
        emit=lambda kind, **data: events.append({"kind": kind, **data}),
        load_result=lambda stage, key: results.get((stage, key)),
        input=step_input,
    )
    return made, events


def _row() -> dict[str, Any]:
    return {"bucket": "{}", "config": {}, "forward_ms": 0.0, "backward_ms": 0.0, "tried": 0}


def honest() -> dict[str, str]:
    return {name: source(load_spec(spec).to_dict()) for name, (spec, _) in OPERATORS.items()}


@pytest.mark.sandbox
def test_right_kernels_align_and_every_one_ran(tmp_path: Path) -> None:
    made, events = context(tmp_path, honest())
    result = run(made)
    assert result.outcome == "ok", result.summary
    assert result.inside_band
    assert 0 < result.worst_share < 1
    assert set(result.swapped) == set(DIGESTS.values())
    assert not result.dropped
    assert result.swapped[DIGESTS["kda"]] == 2  # layers 0 and 1 of the twin's K K M
    kinds = {row.kind for row in result.layers}
    assert kinds == {"output", "gradient"}
    assert len(result.curves.reference) == len(result.curves.candidate) == len(result.curves.band) == 3
    series = {e["series"] for e in events if e["kind"] == "metric"}
    assert series == {"loss.reference", "loss.candidate"}
    live = [e["value"] for e in events if e["kind"] == "metric" and e["series"] == "loss.candidate"]
    assert live == result.curves.candidate
    assert AlignResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_generated_triton_kernels_align_through_the_interpreter(tmp_path: Path) -> None:
    templates = Path(kernel_templates.__file__).parent
    specs = {name: load_spec(spec) for name, (spec, _) in OPERATORS.items()}
    sources = {n: specialise(templates / s.family / "template.py", s).source for n, s in specs.items()}
    made, _ = context(tmp_path, sources, tuned=False)
    result = run(made)
    assert result.outcome == "ok", result.summary
    assert set(result.swapped) == set(DIGESTS.values())
    assert not result.notes


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("guilty", "fault"),
    [
        pytest.param("gated_norm", {"eps": 1e-2}, id="eps"),
        pytest.param("kda", {"decay_share": 0.0}, id="decay ignored", marks=pytest.mark.slow),
        pytest.param("norm", {"offset": 1.0}, id="offset scale", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found_by_name(guilty: str, fault: dict[str, Any], tmp_path: Path) -> None:
    sources = honest()
    sources[guilty] = source(load_spec(OPERATORS[guilty][0]).to_dict(), **fault)
    made, _ = context(tmp_path, sources)
    result = run(made)
    assert result.outcome == "misaligned"
    assert result.culprits == [DIGESTS[guilty]]


@pytest.mark.sandbox
@pytest.mark.slow
def test_a_candidate_that_dies_is_found_by_name(tmp_path: Path) -> None:
    sources = honest()
    sources["mlp"] = sources["mlp"].replace("with torch.no_grad():", "with __import__('os')._exit(3):")
    made, _ = context(tmp_path, sources)
    result = run(made)
    assert result.culprits == [DIGESTS["mlp"]]
    assert any("exit 3" in note for note in result.notes)


@pytest.mark.sandbox
@pytest.mark.slow
def test_dropped_kernels_stay_with_torch(tmp_path: Path) -> None:
    sources = honest()
    sources["kda"] = source(load_spec(OPERATORS["kda"][0]).to_dict(), decay_share=0.0)
    made, _ = context(tmp_path, sources, dropped=[DIGESTS["kda"]])
    result = run(made)
    assert result.outcome == "ok", result.summary
    assert result.dropped == [DIGESTS["kda"]]
    assert DIGESTS["kda"] not in result.swapped
