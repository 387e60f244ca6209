"""A novel module planted into Llama, from the form over REST to a bundle: honest by rules, a kernel by a model."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onboarding.stages.package.bundle_files import verify
from tests.whole.conftest import serving
from tests.whole.test_custom_code import definition, posted

sys.path.append(str(Path(__file__).parents[1] / "agents"))
from llm_server import LlmServer, Said, message

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow, pytest.mark.sandbox]
TAPE = Path(__file__).parents[1] / "agents" / "cassettes" / "quadra-2026-12-01.jsonl"


def report_of(service: httpx.Client, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The report of a job's bundle, which must verify."""
    artifacts = service.get(f"/v1/jobs/{job['id']}/artifacts").json()
    rows = artifacts["items"] if isinstance(artifacts, dict) else artifacts
    (bundle,) = [a for a in rows if a["name"].endswith(".tar.gz") and a["stage"] == "package"]
    content = service.get(f"/v1/jobs/{job['id']}/artifacts/{bundle['digest']}").content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    verify.verify(root, (root / "public_key.hex").read_text().strip())
    report: dict[str, Any] = json.loads((root / "report.json").read_text())
    report["page"] = (root / "report.html").read_text()
    return report


def test_the_rules_end_honest(service: httpx.Client, tmp_path: Path) -> None:
    job = posted(service, definition("quadra"), "quadra", policy="rules")
    assert job["state"] == "succeeded", job
    report = report_of(service, job, tmp_path)
    (named,) = report["gaps"]["novel"]
    assert named["module"] == "QuadraAttention"
    assert named["words"].startswith("novel, served by its own torch code")
    assert "novel, served by its own torch code" in report["page"]
    families = {k["row"]["family"] for k in report["kernels"] if k["fate"] == "shipped"}
    assert families >= {"norm", "gated_activation"}
    assert "novel" not in families
    assert report["align"]["outcome"] == "ok"


@pytest.fixture
def with_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service whose language model is the cassette: the recorded answers of each role, in their order."""
    _, *lines = TAPE.read_text().splitlines()
    left: dict[str, list[Any]] = {}
    for exchange in map(json.loads, lines):
        schema = exchange["body"]["response_format"]["json_schema"]["name"]
        left.setdefault(schema, []).append(exchange["completion"]["choices"][0]["message"]["content"])

    def script(body: dict[str, Any], number: int) -> Said:
        answers = left[body["response_format"]["json_schema"]["name"]]
        return message(answers.pop(0) if len(answers) > 1 else answers[0])

    with LlmServer(script) as server:
        told = {"ONBOARD_LLM_BASE_URL": server.url, "ONBOARD_LLM_MODEL": "cassette", "ONBOARD_LLM_ANSWERS": "schema"}
        with serving(tmp_path_factory.mktemp("novel"), told) as client:
            yield client


def test_a_model_turns_it_into_a_kernel(with_model: httpx.Client, tmp_path: Path) -> None:
    job = posted(with_model, definition("quadra"), "quadra", policy="llm")
    assert job["state"] == "succeeded", job
    report = report_of(with_model, job, tmp_path)
    (named,) = report["gaps"]["novel"]
    assert named["outcome"] == "operator"
    assert named["error"] <= 1e-5
    (kernel,) = [k for k in report["kernels"] if k["row"]["family"] == "novel"]
    assert kernel["fate"] == "shipped"
    assert kernel["verdict"]["outcome"] == "accepted"
    assert report["align"]["swapped"][named["digest"]] >= 1, "the twin ran on it"
    assert report["align"]["outcome"] == "ok"
    roles = {cost["role"] for cost in report["costs"]}
    assert roles >= {"architect", "author", "check", "judge"}
    page = with_model.get(f"/jobs/{job['id']}?tab=agent").text
    assert "proven on the reduced twin" in page
    assert "the architect answers" in page
    (root,) = tmp_path.iterdir()
    assert os.environ.get("ONBOARD_LLM_API_KEY", "no key") not in json.dumps(report)
    assert list((root / "kernels").glob("onboard-novel-*"))
