"""Package: write the bundle, sign it, verify it, and store it with its report."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import platform
import re
import tarfile
from pathlib import Path
from typing import Any

from onboarding.context import StageContext
from onboarding.stages.package.bundle_files import verify as verifier
from onboarding.stages.package.facts import Facts, Kernel, brief, collect
from onboarding.stages.package.layout import KernelEntry, write_helpers, write_kernels
from onboarding.stages.package.report.render import render_report
from onboarding.stages.package.result import PackageResult
from onboarding.stages.package.signing import sign_folder, signing_key

BUNDLE_VERSION = "0.1.0"


def run(context: StageContext) -> PackageResult:
    """Write the job's bundle and store it.

    Raises:
        LookupError: an upstream stage has not finished.
        BundleError: the written bundle does not verify.
    """
    context.progress(0, 4, "collecting results")
    facts = collect(context)
    narrative = context.policy.narrate(brief(facts))
    facts = facts.model_copy(update={"narrative": narrative, "costs": context.policy.costs()})
    name = bundle_name(facts.intake.name)
    folder = context.scratch / name
    folder.mkdir(parents=True)

    context.progress(1, 4, "writing kernels")
    _write_kernels(context, folder, facts, name)
    write_helpers(folder)

    context.progress(2, 4, "writing the report")
    report = facts.model_dump_json(indent=1)
    (folder / "report.json").write_text(report + "\n")
    page = render_report(facts, bundle_name=name)
    (folder / "report.html").write_text(page)
    (folder / "provenance.json").write_text(_json(provenance(facts)))

    context.progress(3, 4, "signing and verifying")
    key_file = context.settings.resolved_home / "signing.key"
    public_key, manifest = sign_folder(folder, signing_key(key_file))
    verifier.verify(folder, public_key)
    bundle = context.save(f"{name}.tar.gz", archive(folder), "application/gzip")
    report_ref = context.save("report.html", page.encode(), "text/html")
    return PackageResult(
        summary=f"{len(facts.shipped)} kernels, bundle signed",
        bundle=bundle,
        bundle_name=name,
        report=report_ref,
        kernels=[kernel.digest for kernel in facts.shipped],
        public_key=public_key,
        manifest_sha256=manifest,
    )


def bundle_name(name: str) -> str:
    """A folder's name that a shell, a path and Python's source take as it is, from whatever a user called the model."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return f"{plain[:100] or 'model'}-{BUNDLE_VERSION}"


def _write_kernels(context: StageContext, folder: Path, facts: Facts, name: str) -> None:
    entries = [kernel_entry(context, kernel) for kernel in facts.shipped]
    index = {
        "format": 1,
        "name": name,
        "model_type": facts.intake.model_type,
        "kernels": write_kernels(folder, entries),
    }
    (folder / "bundle.json").write_text(_json(index))


def kernel_entry(context: StageContext, kernel: Kernel) -> KernelEntry:
    """What the layout needs to write one shipped kernel's package."""
    assert kernel.generated is not None
    assert kernel.verdict is not None
    return KernelEntry(
        digest=kernel.digest,
        spec=kernel.generated.spec,
        words=kernel.words,
        source=context.artifacts.get(kernel.generated.candidate.digest).decode(),
        bindings=[b.model_dump(mode="json") for use in kernel.uses for b in use.bindings],
        verified=[
            {
                "level": kernel.verdict.level,
                "device": kernel.verdict.device,
                "triton": kernel.verdict.triton,
                "torch": kernel.verdict.torch,
            }
        ],
        tuned=kernel.tuned.model_dump(mode="json") if kernel.tuned else None,
    )


def provenance(facts: Facts) -> dict[str, Any]:
    """Where every part of the bundle comes from, enough to make it again."""
    packages = ("onboard", "torch", "triton", "transformers", "numpy")
    return {
        "job": facts.job_id,
        "profile": facts.profile,
        "definition_sha256": facts.intake.digest,
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "machine": {"system": platform.system(), "machine": platform.machine()},
        "kernels": [
            {
                "digest": k.digest,
                "candidate_sha256": k.verdict.candidate,
                "template": k.generated.template,
                "judge_seed": k.verdict.seed,
                "level": k.verdict.level,
                "device": k.verdict.device,
                "sandbox": k.verdict.sandbox,
            }
            for k in facts.shipped
            if k.verdict is not None and k.generated is not None
        ],
        "alignment": {"corpus": facts.align.corpus, "twin": facts.align.twin, "dtype": facts.align.dtype},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def archive(folder: Path) -> bytes:
    """The folder as tar.gz, byte for byte the same for the same content: sorted names, no times, no owners."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            info = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            content = path.read_bytes()
            info.size, info.mode, info.mtime = len(content), 0o644, 0
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
