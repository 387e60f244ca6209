"""generate: one operator spec in, one candidate module out."""

from __future__ import annotations

import hashlib
from pathlib import Path

import kernel_templates
from kernel_templates.registry import load_spec
from onboarding.context import StageContext
from onboarding.problem import Problem
from onboarding.stages.gaps.result import GapsResult
from onboarding.stages.generate.folding import SpecialiseError
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.generate.specialize import specialise

TEMPLATES = Path(kernel_templates.__file__).parent


def run(context: StageContext) -> GenerateResult:
    """Specialise the family's template for the operator whose digest is ``context.key``.

    Raises:
        Problem: the gap analysis names no such operator, or the template cannot be specialised.
    """
    gaps = context.result("gaps", GapsResult)
    found = next((row.spec for row in gaps.rows if row.digest == context.key and row.spec), None)
    if found is None:
        raise Problem(
            "operator-unknown",
            f"the gap analysis has no operator {context.key}",
            "retry the job from the gaps stage",
        )
    spec = load_spec(found)
    template = TEMPLATES / spec.family / "template.py"
    context.progress(0, 1, spec.words())
    try:
        module = specialise(template, spec)
    except SpecialiseError as problem:
        raise Problem(
            "template-not-specialised", f"the {spec.family} template cannot be specialised", str(problem)
        ) from problem
    name = f"{spec.family}_{context.key}.py"
    candidate = context.save(name, module.source.encode(), "text/x-python")
    context.progress(1, 1, spec.words())
    return GenerateResult(
        summary=f"{len(module.kernels)} kernels, {module.source.count(chr(10))} lines: {spec.words()}",
        spec=spec.to_dict(),
        words=spec.words(),
        candidate=candidate,
        template=f"kernel_templates/{spec.family}/template.py {hashlib.sha256(template.read_bytes()).hexdigest()}",
        lines=module.source.count("\n"),
        kernels=module.kernels,
        entry={"forward": "forward", "backward": "backward"},
    )
