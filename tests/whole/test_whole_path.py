"""From a published definition over REST to a bundle that works without this project. One service, one job a model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.timeout(1800)

# Totals of the published checkpoints, in elements (sources: examples/README.md).
PUBLISHED = {
    "kimi-linear": 49_122_681_728,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 81_324_862_720,
    "deepseek-v3": 684_531_386_000,
    "glm-5.3-flash": 321_323_031_390,
    "llama-3.1-8b": 8_030_261_248,
}
STAGES = {"intake", "parse", "gaps", "generate", "judge", "tune", "align", "throughput", "scale", "package"}

# Runs in a process that can import torch, triton and transformers, and nothing of this project.
ALONE = """
import json, sys
from importlib.abc import MetaPathFinder


PROJECT = {"api", "workers", "agents", "onboarding", "runtime", "kernel_templates"}


class NoProject(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PROJECT | {"cryptography"}:
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, NoProject())
bundle, example = sys.argv[1:]
sys.path.insert(0, bundle)
from apply import apply, load_op

import torch
from transformers import AutoConfig, AutoModelForCausalLM

fields = json.load(open(example))
model_type = fields.pop("model_type")
fields |= dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, vocab_size=96)
fields |= dict(num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16)
fields |= dict(v_head_dim=16, num_experts=8, num_experts_per_token=2, pad_token_id=0)
fields["linear_attn_config"] |= dict(full_attn_layers=[4], kda_layers=[1, 2, 3], head_dim=16, num_heads=2)
torch.manual_seed(0)
config = AutoConfig.for_model(model_type, **fields)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
for name, parameter in model.named_parameters():
    if "gate.weight" in name:
        torch.nn.init.normal_(parameter, std=0.5)
words = torch.randint(0, 96, (1, 40))
want = model(words, labels=words).loss
want_gradient = torch.autograd.grad(want, model.model.embed_tokens.weight)[0]
key = open(bundle + "/public_key.hex").read().strip()
applied = apply(model, trusted_key=key)
got = model(words, labels=words).loss
got_gradient = torch.autograd.grad(got, model.model.embed_tokens.weight)[0]
error = ((got_gradient - want_gradient).norm() / want_gradient.norm()).item()
print(json.dumps({"loss": got.item(), "want": want.item(), "gradient": error, "ran": len(applied.ran())}))
norm = next(k["digest"] for k in json.load(open(bundle + "/bundle.json"))["kernels"] if k["spec"]["family"] == "norm")
assert callable(load_op(norm, trusted_key=key))
"""


def finished(service: httpx.Client, example: str) -> dict[str, Any]:
    """Submit an example at the quick profile, wait for its end, and return the job."""
    answer = service.post("/v1/jobs", json={"example": example, "options": {"profile": "quick", "device": "cpu"}})
    assert answer.status_code == 202, answer.text
    address = answer.headers["Location"]
    deadline = time.monotonic() + 1500
    while (job := service.get(address).json())["state"] in ("queued", "running"):
        assert time.monotonic() < deadline, job
        time.sleep(0.5)
    return dict(job)


def stage(service: httpx.Client, job: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(service.get(f"/v1/jobs/{job['id']}/stages/{name}").json())


def pulled(service: httpx.Client, job: dict[str, Any], folder: Path) -> Path:
    """The job's bundle, unpacked."""
    artifacts = service.get(f"/v1/jobs/{job['id']}/artifacts").json()
    rows = artifacts["items"] if isinstance(artifacts, dict) else artifacts
    (bundle,) = [a for a in rows if a["name"].endswith(".tar.gz") and a["stage"] == "package"]
    content = service.get(f"/v1/jobs/{job['id']}/artifacts/{bundle['digest']}").content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


@pytest.mark.parametrize(
    "example", ["kimi-linear", *(pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED if n != "kimi-linear")]
)
def test_a_published_definition_becomes_a_bundle(service: httpx.Client, example: str, tmp_path: Path) -> None:
    job = finished(service, example)
    assert job["state"] == "succeeded", job
    bundle = pulled(service, job, tmp_path)
    report = json.loads((bundle / "report.json").read_text())
    total = report["parse"]["architecture"]["census"]["total"]
    assert abs(total / PUBLISHED[example] - 1) < 0.005
    assert report["kernels"], "every one of these models has operators without a fast provider"
    assert [k["fate"] for k in report["kernels"]] == ["shipped"] * len(report["kernels"])
    assert report["align"]["outcome"] == "ok"
    assert report["align"]["worst_share"] <= 1.0
    key = stage(service, job, "package")["results"][0]["result"]["public_key"]
    verified = subprocess.run(
        [sys.executable, "-I", bundle / "verify.py", bundle, "--key", key], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stderr
    if example == "kimi-linear":
        _works_alone(bundle, tmp_path)


def _works_alone(bundle: Path, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    config = Path(__file__).parents[2] / "examples" / "kimi-linear" / "config.json"
    run = subprocess.run(
        [sys.executable, "-P", script, bundle, config], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.strip().splitlines()[-1])
    assert told["ran"] >= 4, told
    assert told["loss"] == pytest.approx(told["want"], rel=1e-5)
    assert told["gradient"] < 1e-4
