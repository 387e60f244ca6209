"""A definition with code of its own, from the form over REST to a signed bundle; and one that means harm."""

from __future__ import annotations

import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]
MODELS = Path(__file__).parents[1] / "custom_models"

# What each model must get kernels for: families whose operators were proven inside its own code.
FAMILIES = {
    "plain": {"norm", "gated_activation"},
    "nimbus": {"norm", "gated_activation"},
    "strata": {"norm", "gated_activation"},
    "kappa": {"norm", "gated_activation", "moe", "linear_attention"},
}


def posted(service: httpx.Client, files: dict[str, bytes], name: str, **more: Any) -> dict[str, Any]:
    """The job of some files at its end."""
    options = json.dumps({"profile": "quick", "device": "cpu", **more})
    parts = [("files", (path, content)) for path, content in files.items()]
    answer = service.post("/v1/jobs", files=parts, data={"name": name, "options": options})
    assert answer.status_code == 202, answer.text
    deadline = time.monotonic() + 1500
    while (job := service.get(answer.headers["Location"]).json())["state"] in ("queued", "running"):
        assert time.monotonic() < deadline, job
        time.sleep(0.5)
    return dict(job)


def definition(name: str) -> dict[str, bytes]:
    folder = MODELS / name
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix in (".py", ".json")]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_code_becomes_a_bundle(service: httpx.Client, name: str) -> None:
    job = posted(service, definition(name), name)
    assert job["state"] == "succeeded", job
    artifacts = service.get(f"/v1/jobs/{job['id']}/artifacts").json()
    rows = artifacts["items"] if isinstance(artifacts, dict) else artifacts
    (bundle,) = [a for a in rows if a["name"].endswith(".tar.gz") and a["stage"] == "package"]
    content = service.get(f"/v1/jobs/{job['id']}/artifacts/{bundle['digest']}").content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = {m.name.partition("/")[2]: m for m in tar.getmembers()}
        file = tar.extractfile(members["report.json"])
        assert file is not None
        report = json.loads(file.read())
    assert report["intake"]["runs_code"]
    assert any("own code was run, in the sandbox only" in w for w in report["parse"]["architecture"]["warnings"])
    shipped = {k["row"]["family"] for k in report["kernels"] if k["fate"] == "shipped"}
    assert shipped >= FAMILIES[name]
    assert report["align"]["outcome"] == "ok"


def test_harm_ends_the_job_and_nothing_else(service: httpx.Client, tmp_path: Path) -> None:
    files = definition("plain")
    harm = f"import os\nos.system('touch {tmp_path}/x')\nos.fork()\nraise SystemExit\n"
    hostile = {**files, "tinyformer/model.py": harm.encode() + files["tinyformer/model.py"]}
    job = posted(service, hostile, "hostile")
    assert job["state"] == "failed"
    assert (job["problem"]["stage"], job["problem"]["file"]) == ("parse", "tinyformer/model.py")
    assert job["problem"]["line"] == 4
    assert not (tmp_path / "x").exists()
    assert service.get("/readyz").status_code == 200
    intake = service.get(f"/v1/jobs/{job['id']}/stages/intake").json()["results"][0]["result"]
    assert any("os.system" in line for line in intake["suspicious"])
