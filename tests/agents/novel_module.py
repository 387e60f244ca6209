"""A novel module as a survey sees it, an honest proposal for it, and a step's context around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.novel.facts import CoreSeen, NovelModule, OperatorProposal, TensorSeen
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.settings import Settings
from onboarding.stages.gaps.result import GapsResult
from onboarding.twin.plan import TwinPlan

AXES = ["B", "H", "T", "D"]
PLAN = TwinPlan(config={}, class_name="QuadraForCausalLM", layers=(0, 1), sizes={})
REFERENCE = """import torch


def reference(q, k, v):
    length = q.shape[2]
    seen = torch.arange(1, length + 1, dtype=q.dtype, device=q.device)
    causal = torch.ones(length, length, dtype=q.dtype, device=q.device).tril()
    weight = torch.relu(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + 1).square() * causal
    return (weight / seen[:, None]) @ v
"""


def tensor(argument: str) -> TensorSeen:
    return TensorSeen(
        argument=argument, dtype="bfloat16", twin=[2, 4, 24, 16], sizes=[(1, 0), (32, 0), (0, 1), (64, 0)], spread=0.9,
        low=-3.0, high=3.0,
    )  # fmt: skip


def module(source: str = "class QuadraAttention: ...") -> NovelModule:
    core = CoreSeen(
        function="rectified_attention",
        source="def rectified_attention(query, key, value, scaling): ...",
        tensors=[tensor(name) for name in ("query", "key", "value")],
        constants={"scaling": "0.25"},
        outputs=[[2, 4, 24, 16]],
        single=True,
        calls=16,
        operators=(688.0, 0.0, 0.0),
        moved=(0.0, 1e6, 1e4),
    )
    whole = CoreSeen(function="", source="", tensors=[], outputs=[], single=False, calls=16, obstacle="a tuple")
    place = "onboard_definition.modeling_quadra:QuadraAttention"
    return NovelModule(
        name="QuadraAttention", target=place, paths=["layers.0.attn"], source=source, cores=[whole, core]
    )


def answer(**changes: Any) -> dict[str, Any]:
    """What an architect answers."""
    named = (("q", "query"), ("k", "key"), ("v", "value"))
    return {
        "name": "rectified quadratic attention",
        "function": "rectified_attention",
        "inputs": [{"name": n, "argument": a, "shape": AXES} for n, a in named],
        "constants": [{"argument": "scaling", "value": "D ** -0.5"}],
        "outputs": [{"name": "o", "shape": AXES}],
        "source": REFERENCE,
        **changes,
    }


def proposal(**changes: Any) -> OperatorProposal:
    return OperatorProposal.model_validate(answer(**changes))


GAPS = GapsResult(summary="1 operator", target="h200", sequence_length=2048, rows=[], gaps=[], step_ms=100.0)


class Context(StageContext):
    """A step's context whose upstream results are given."""

    def result(self, stage: str, model: Any, key: str = "") -> Any:
        found = self.load_result(stage, key)
        return found if isinstance(found, SimpleNamespace) else model.model_validate(found)


def context(
    home: Path, stage: str, policy: Any = None, load: Callable[[str, str], Any] = lambda s, k: None, attempt: int = 1
) -> Context:
    (home / "scratch").mkdir(exist_ok=True)
    return Context(
        job_id="job",
        job_name="name",
        stage=stage,
        key="",
        attempt=attempt,
        options=JobOptions(sequence_length=2048),
        profile=PROFILES["quick"],
        settings=Settings(home=home),
        scratch=home / "scratch",
        artifacts=ArtifactStore((home / "artifacts").as_uri()),
        policy=policy or RulePolicy(),
        emit=lambda kind, **data: None,
        load_result=load,
    )


def parsed(*names: str) -> Callable[[str, str], Any]:
    """Upstream results: a parse that found novel modules."""
    architecture = SimpleNamespace(novel=list(names), novel_references=[])
    return lambda stage, key: SimpleNamespace(architecture=architecture) if stage == "parse" else None


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
