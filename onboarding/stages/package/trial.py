"""The bundle as it would be shipped, unsigned, for the stages that try it before it is packaged. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from onboarding.architecture import Architecture
from onboarding.context import StageContext
from onboarding.stages.gaps.result import GapsResult
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.package.layout import KernelEntry, write_helpers, write_kernels


def accepted(context: StageContext) -> list[str]:
    """Digests of the operators whose candidate the judge accepted, in the order of the gaps."""
    gaps = context.result("gaps", GapsResult)
    verdicts = {digest: context.load_result("judge", digest) for digest in gaps.gaps}
    return [digest for digest, verdict in verdicts.items() if verdict and verdict.get("outcome") == "accepted"]


def write_trial_bundle(context: StageContext, architecture: Architecture, digests: Sequence[str]) -> Path:
    """Write ``bundle/`` into the scratch folder.

    On the interpreter linear attention gets chunks so short that the twin's sequence holds four.

    Args:
        context: of the stage that tries the kernels.
        architecture: says where each operator is used.
        digests: of the accepted operators to put in.
    """
    known = [*architecture.uses, *context.result("gaps", GapsResult).uses]
    uses = {digest: [use for use in known if use.digest == digest] for digest in digests}
    entries = []
    for digest in digests:
        generated = context.result("generate", GenerateResult, digest)
        verdict = context.result("judge", JudgeResult, digest)
        entries.append(
            KernelEntry(
                digest=digest,
                spec=generated.spec,
                words=generated.words,
                source=context.artifacts.get(generated.candidate.digest).decode(),
                bindings=[b.model_dump(mode="json") for use in uses[digest] for b in use.bindings],
                verified=[
                    {
                        "level": verdict.level,
                        "device": verdict.device,
                        "triton": verdict.triton,
                        "torch": verdict.torch,
                    }
                ],
                tuned=context.load_result("tune", digest) or None,
                config_overrides=_chunks(generated.spec["family"], context.profile.chunk),
            )
        )
    folder = context.scratch / "bundle"
    folder.mkdir()
    index = {
        "format": 1,
        "name": context.job_name,
        "model_type": architecture.model_type,
        "kernels": write_kernels(folder, entries),
    }
    (folder / "bundle.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    write_helpers(folder)
    return folder


def _chunks(family: str, chunk: int) -> dict[str, dict[str, int]]:
    return {"interpreter": {"chunk": chunk}} if family == "linear_attention" else {}
