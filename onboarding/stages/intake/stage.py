"""The intake stage: unpack, check, digest and store the definition in normal form."""

from __future__ import annotations

from onboarding.context import StageContext
from onboarding.stages.intake.archive import normalised_tar
from onboarding.stages.intake.check import check_definition
from onboarding.stages.intake.result import IntakeResult


def run(context: StageContext) -> IntakeResult:
    """Check the job's definition artifact and store it as a normalised tar.

    Raises:
        Problem: the definition is refused; see :func:`onboarding.stages.intake.check.check_definition`.
    """
    context.progress(0, 2, "unpack and check")
    checked = check_definition(context.artifacts.get(context.definition))
    context.progress(1, 2, "store")
    definition = context.save("definition.tar", normalised_tar(checked.files), "application/x-tar")
    context.progress(2, 2)
    what = "config only" if set(checked.files) == {"config.json"} else f"{len(checked.files)} files"
    code = ", with code of its own" if checked.runs_code else ", its code not needed" if checked.has_code else ""
    return IntakeResult(
        summary=f"{what}{code}, digest {checked.digest[:8]}",
        name=context.job_name,
        model_type=checked.model_type,
        source=checked.source,
        digest=checked.digest,
        definition=definition,
        config=checked.config,
        files=sorted(checked.files),
        has_code=checked.has_code,
        runs_code=checked.runs_code,
        has_tokenizer=checked.has_tokenizer,
        imports=list(checked.imports),
        optional=list(checked.optional),
        suspicious=list(checked.suspicious),
    )
