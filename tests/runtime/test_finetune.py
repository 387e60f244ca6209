"""``onboard finetune``: what becomes of a request, what is refused, and the whole way on a bundle without kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime_models import CONFIGS, text_file

from api.cli.finetune import nested
from api.cli.finetune_view import Run, lines, sparkline
from onboarding.finetune import Options, merged, prepare
from onboarding.problem import Problem
from onboarding.stages.package import bundle_files
from onboarding.stages.package.signing import sign_folder, signing_key
from runtime.config import ModelConfig, load
from runtime.kernels import check_bundle
from runtime.model import read_definition
from runtime.refusal import Refused
from runtime.voice import Voice

ROOT = Path(__file__).parents[2]
CARRIED = Path(bundle_files.__file__).parent


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed bundle without kernels for a small model; this user trusts its key."""
    folder = tmp_path / "small-0.1.0"
    folder.mkdir()
    (folder / "bundle.json").write_text(json.dumps({"name": "small", "model_type": "qwen3_moe", "kernels": []}))
    (folder / "report.json").write_text(json.dumps({"intake": {"config": CONFIGS["qwen3-moe"]}}))
    for path in CARRIED.glob("*.py"):
        if path.name != "__init__.py":
            shutil.copyfile(path, folder / path.name)
    key, _ = sign_folder(folder, signing_key(tmp_path / "signing.key"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "onboard").mkdir(parents=True)
    (tmp_path / "config" / "onboard" / "trusted_keys").write_text(f"{key}  a service\n")
    return folder


def choice(bundle: Path, key: str | None = None) -> ModelConfig:
    return ModelConfig(definition="d", bundle=str(bundle), trusted_key=key)


# ---- bundles ----------------------------------------------------------------------------------------------------


def test_a_trusted_bundle_is_checked_without_running_any_of_it(bundle: Path) -> None:
    for name in ("apply.py", "verify.py"):
        assert (bundle / name).is_file()
    before = set(sys.modules)
    key = check_bundle(choice(bundle))
    assert key == (bundle / "public_key.hex").read_text().strip()
    assert not any("bundle" in name for name in set(sys.modules) - before)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: (b / "apply.py").write_text("print('mine')"), r"apply\.py was changed"),
        (lambda b: (b / "extra.py").write_text(""), r"extra\.py is not part of it"),
        (lambda b: (b / "hooks.py").unlink(), r"hooks\.py is missing"),
        (lambda b: (b / "MANIFEST.sha256").write_text(""), "does not match its signature"),
        (lambda b: (b / "public_key.hex").write_text("00" * 32), "is not trusted here"),
        (lambda b: (b / "bundle.json").unlink(), r"has no bundle\.json"),
    ],
)
def test_a_bundle_that_is_not_what_was_signed_is_refused(bundle: Path, damage: Any, words: str) -> None:
    damage(bundle)
    with pytest.raises(Refused, match=words):
        check_bundle(choice(bundle))


def test_a_named_key_is_the_only_one_that_counts(bundle: Path) -> None:
    key = (bundle / "public_key.hex").read_text().strip()
    assert check_bundle(choice(bundle, key.upper())) == key
    with pytest.raises(Refused, match="is not trusted here"):
        check_bundle(choice(bundle, "ab" * 32))


# ---- from a request to a run ------------------------------------------------------------------------------------


def options(bundle: Path, **changes: Any) -> Options:
    output = bundle.parent / "out"
    return Options(
        bundle=str(bundle), key="ab" * 32, data=["a.jsonl", "s3://b/c.parquet"], output=str(output), **changes
    )


def test_given_weights_become_a_run_with_defaults_that_suit_them(bundle: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(CONFIGS["qwen3-moe"]))
    quiet = Voice(first=False, events=True)
    settings = {"memory": {"recompute": "swap_cache"}, "step": {"max_norm": 0.5}}
    config = load(prepare(options(bundle, weights=str(weights), steps=40, settings=settings), quiet))
    assert config.model.weights == config.model.definition == str(weights)
    assert config.model.bundle == str(bundle)
    assert config.data.files == (str(Path("a.jsonl").resolve()), "s3://b/c.parquet")
    assert config.data.tokenizer == "model"
    assert config.lora is not None
    assert config.lora.targets == ("linear", "gmm")
    assert (config.steps, config.optimizer.warmup_steps, config.optimizer.lr) == (40, 4, 2e-4)
    assert (config.memory.recompute, config.step.max_norm, config.step.batch) == ("swap_cache", 0.5, 8)
    full = load(prepare(options(bundle, weights=str(weights), full=True, kernels=False), quiet))
    assert full.lora is None
    assert full.model.bundle is None
    assert full.optimizer.lr == 1e-5


def test_a_begun_folder_goes_on_only_with_the_same_request(bundle: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(CONFIGS["qwen3-moe"]))
    quiet = Voice(first=False, events=True)
    asked = options(bundle, weights=str(weights))
    prepare(asked, quiet)
    (Path(asked.output) / "checkpoints").mkdir()
    prepare(asked.model_copy(update={"steps": 99}), quiet)  # more steps of the same run
    for change in ({"data": ["other.jsonl"]}, {"full": True}, {"rank": 3}):
        with pytest.raises(Problem, match="holds a run with another"):
            prepare(asked.model_copy(update=change), quiet)


def test_infinite_numbers_as_transformers_writes_them(tmp_path: Path) -> None:
    import transformers

    transformers.Mamba2Config(num_hidden_layers=1).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_definition(tmp_path).time_step_limit[1] == float("inf")


def test_weights_of_another_model_are_refused_by_their_config(bundle: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w"
    weights.mkdir()
    quiet = Voice(first=False, events=True)
    with pytest.raises(Problem, match=r"no readable config\.json"):
        prepare(options(bundle, weights=str(weights)), quiet)
    (weights / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Problem, match="of a 'llama' model, the bundle is for 'qwen3_moe'"):
        prepare(options(bundle, weights=str(weights)), quiet)
    with pytest.raises(Problem, match="kernels, not weights"):
        prepare(options(bundle), quiet)


def test_a_model_with_code_of_its_own_is_refused_with_the_way_to_train_it(bundle: Path, tmp_path: Path) -> None:
    report = {"intake": {"config": CONFIGS["qwen3-moe"], "name": "orbit", "runs_code": True}}
    (bundle / "report.json").write_text(json.dumps(report))
    with pytest.raises(Problem, match="orbit is defined by its own code") as refused:
        prepare(options(bundle, twin=True), Voice(first=False, events=True))
    assert refused.value.kind == "model-brings-code"
    assert "trust_remote_code=True" in refused.value.detail
    assert "from apply import apply" in refused.value.detail


def test_settings_are_nested_fields_with_yaml_values() -> None:
    assert nested(["a.b=1e-1", "a.c=[1, x]", "d=true"]) == {"a": {"b": "1e-1", "c": [1, "x"]}, "d": True}
    assert merged({"a": {"b": 1, "c": 2}, "d": None}, {"a": {"c": 3}, "d": {"e": 4}}) == {
        "a": {"b": 1, "c": 3},
        "d": {"e": 4},
    }
    for bad in ("novalue", "a b=1", "=3"):
        with pytest.raises(Problem, match="is not FIELD=VALUE"):
            nested([bad])


# ---- what is shown ----------------------------------------------------------------------------------------------


def test_events_become_lines(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 3, "steps": 9, "loss": 2.5, "grad_norm": 1.25, "tokens_per_second": 812.4}
    assert lines(step) == ["  step 3/9  loss 2.5000  norm 1.250  812 tokens/s"]
    assert lines({"kind": "budget", "lines": ["device", "host"]}) == ["  device", "  host"]
    failed = {"kind": "checkpoint-failed", "step": 4, "why": "no space"}
    assert "step 4 was not written: no space" in lines(failed)[0]
    assert lines({"kind": "result"}) == []
    assert sparkline([0.0, 7.0, float("nan"), 3.5]) == "▁█▅"
    assert sparkline([]) == ""
    run = Run(tmp_path)
    run.log.write_text("Traceback (most recent call last):\n  File x\nValueError: odd\n")
    assert run.crashed(1).title == "the run failed: ValueError: odd"


def onboard(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "api.cli.main", "finetune", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)


def test_what_the_command_line_refuses_it_refuses_at_once(bundle: Path, tmp_path: Path) -> None:
    done = onboard(str(bundle), "--data", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "--twin" in done.stderr
    for rate in ("nan", "inf", "0", "-1"):
        done = onboard(str(bundle), "--data", "a.jsonl", "--twin", "--lr", rate, cwd=tmp_path)
        assert (done.returncode, list(tmp_path.glob("finetuned"))) == (1, [])
        assert "is no learning rate" in done.stderr
    (bundle / "apply.py").write_text("")
    done = onboard(str(bundle), "--data", "a.jsonl", "--twin", cwd=tmp_path)
    assert done.returncode == 1
    assert "apply.py was changed after signing" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_way_from_a_bundle_to_an_adapter(bundle: Path, tmp_path: Path) -> None:
    data = text_file(tmp_path / "data.jsonl")
    wrong = onboard(str(bundle), "--data", "absent.jsonl", "--twin", "--device", "cpu", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "no data file at" in wrong.stderr
    plan = onboard(str(bundle), "--data", str(data), "--twin", "--device", "cpu", "--dry-run", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert "this was a dry run" in plan.stdout
    done = onboard(str(bundle), "--data", str(data), "--twin", "--device", "cpu", "--steps", "6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout
    adapter = tmp_path / "finetuned" / "adapter"
    assert {p.name for p in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    records = [json.loads(x) for x in (tmp_path / "finetuned" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"]
