"""judge: one candidate in, a verdict out. Verdicts are cached by everything they depend on."""

from __future__ import annotations

import hashlib
import json
import traceback
from pathlib import Path

import torch

from kernel_templates.registry import load_spec
from kernel_templates.spec import OperatorSpec
from onboarding.context import StageContext
from onboarding.problem import Problem, StageSkipped
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.judge.version import judge_version


def run(context: StageContext) -> JudgeResult:
    """Judge the candidate that generate made for the operator ``context.key``.

    Raises:
        Problem: no sandbox works here, or this machine fails it. A bad candidate is a refusal, not an error.
        StageSkipped: judging this operator ran into a fault of the judge's own; the others go on.
    """
    generated = context.result("generate", GenerateResult, context.key)
    source = context.artifacts.get(generated.candidate.digest)
    spec = load_spec(generated.spec)
    device = choose_device(context.options.device)
    cache = VerdictCache(context.settings.resolved_home / "verdicts")
    key = cache.key(source, spec, device, context.profile.judge_cases)
    result = cache.get(key)
    if result is None:
        try:
            result = judge(
                source,
                spec,
                folder=context.scratch / "judge",
                device=device,
                cases=context.profile.judge_cases,
                unsafe=context.settings.unsafe_no_sandbox,
                progress=context.progress,
            )
        except (Problem, OSError, MemoryError):
            raise  # of this machine: trying again may help
        except Exception as fault:
            # the same inputs would raise it again: it costs this operator its kernel, not the job
            traceback.print_exc()
            why = f"the judge itself failed on this operator ({type(fault).__name__}: {fault})"[:400]
            raise StageSkipped(f"{why}; torch keeps serving it. Please report this with the step's log") from fault
        cache.put(key, result)
    document = context.save(
        f"verdict_{context.key}.json", result.model_dump_json(indent=2).encode(), "application/json"
    )
    return result.model_copy(update={"document": document})


def choose_device(asked: str) -> str:
    """``cuda`` or ``cpu`` for a job's ``device`` option.

    Raises:
        Problem: ``gpu-missing``: a GPU was asked for and there is none.
    """
    present = torch.cuda.is_available()
    if asked == "cuda" and not present:
        raise Problem(
            "gpu-missing", "the job asks for a GPU and this worker has none", "submit it with device auto or cpu"
        )
    return "cuda" if present and asked != "cpu" else "cpu"


class VerdictCache:
    """Verdicts by (candidate, spec, the judge's own sources, device, software); plain files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self, source: bytes, spec: OperatorSpec, device: str, cases: int) -> str:
        """Digest of everything that a verdict depends on but its seed."""
        import triton

        facts = {
            "candidate": hashlib.sha256(source).hexdigest(),
            "spec": spec.to_dict(),
            "judge": judge_version(spec.family),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "software": [torch.__version__, triton.__version__],
            "cases": cases,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> JudgeResult | None:
        """The stored verdict, or None; a damaged file counts as none."""
        try:
            return JudgeResult.model_validate_json((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, key: str, result: JudgeResult) -> None:
        """Store an accepted verdict. Refusals are not kept: they may be this machine's fault (time, memory)."""
        if result.outcome != "accepted":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}.json"
        temporary = path.with_suffix(f".{id(result)}")
        temporary.write_text(result.model_dump_json())
        temporary.replace(path)
