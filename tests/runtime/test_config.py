"""Configs: read, refused, written and read again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime import config as module
from runtime.config import DataConfig, ModelConfig, RunConfig, dump, load
from runtime.refusal import Refused

BASE: dict[str, Any] = {
    "output": "out",
    "steps": 10,
    "model": {"definition": "def"},
    "data": {"files": ["a.jsonl"]},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(yaml.safe_dump(BASE))
    *parents, last = path.split(".")
    place = data
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return data


def read(tmp_path: Path, data: Any) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    data = changed("lora", {"r": 4, "targets": ["linear"]})
    data["telemetry"] = {"alerts": [{"rule": "imbalance", "limit": 4, "action": "stop"}]}
    config = read(tmp_path, data)
    assert config.lora is not None
    assert config.lora.targets == ("linear",)
    assert config.telemetry.alerts[0].limit == 4.0
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml") == config


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE) + "optimizer: {lr: 1e-4}\n")
    assert load(tmp_path / "run.yaml").optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("optimiser", {}, "did you mean optimizer"),
        ("step.microbach", 2, "did you mean microbatch"),
        ("steps", 0, "above zero"),
        ("steps", "many", "int is wanted"),
        ("steps", True, "int is wanted"),
        ("data.files", [], "name at least one file"),
        ("data.files", "a.jsonl", "a list is wanted"),
        ("data.packing", "tight", "one of 'cut', 'whole', 'none'"),
        ("data.sequence_length", 1, "a next token needs two"),
        ("model", None, "no mapping"),
        ("optimizer.betas", [0.9], "two numbers"),
        ("optimizer.warmup_steps", 11, "there are 10 steps"),
        ("step.spike", 0.5, "multiple above 1"),
        ("checkpoint.keep", 0, "above zero"),
        ("telemetry.alerts", [{"rule": "stall"}], "above zero"),
        ("telemetry.alerts", [{"rule": "boredom"}], "one of 'nan'"),
        ("parallel.ep", 0, "at least 1"),
        ("lora", {"r": 0}, "at least 1"),
        ("lora", {"targets": []}, "targets is empty"),
        ("lora", {"alpha": float("nan")}, "above zero and finite"),
        ("optimizer.lr", float("nan"), "above zero and finite"),
        ("optimizer.lr", float("inf"), "above zero and finite"),
        ("optimizer.weight_decay", float("nan"), "finite and not negative"),
        ("step.max_norm", float("inf"), "finite and not negative"),
    ],
)
def test_bad_fields_are_refused_by_name_with_the_fix(tmp_path: Path, path: str, value: Any, words: str) -> None:
    with pytest.raises(Refused) as refused:
        read(tmp_path, changed(path, value))
    assert words in f"{refused.value}"


@pytest.mark.parametrize(
    ("text", "kind"), [("a: [", "config-not-yaml"), ("- 1", "config-field"), ("{}", "config-field")]
)
def test_files_that_are_no_config_are_refused(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(Refused) as refused:
        load(tmp_path / "run.yaml")
    assert refused.value.kind == kind
    with pytest.raises(Refused, match="cannot read"):
        load(tmp_path / "absent.yaml")


def a_run() -> RunConfig:
    return RunConfig(output="o", steps=3, model=ModelConfig(definition="d"), data=DataConfig(files=("f",)))


def test_a_run_is_a_function_that_returns_a_whole_config() -> None:
    assert load(f"{__name__}:a_run") == a_run()
    with pytest.raises(Refused, match="a RunConfig is wanted"):
        load("os:getcwd")


def test_a_batch_must_be_a_multiple_of_the_ranks(tmp_path: Path) -> None:
    config = read(tmp_path, changed("step", {"batch": 8, "microbatch": 2}))
    assert [config.microsteps(n) for n in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(Refused, match=r"set step\.batch to 12"):
        config.microsteps(3)


def test_every_field_says_what_it_is() -> None:
    source = Path(module.__file__).read_text()
    for cls in vars(module).values():
        if is_dataclass(cls) and cls.__module__ == module.__name__:
            for field in fields(cls):
                after = source.split(f"    {field.name}: ")[1:]
                assert any('"""' in text.split("\n    ", 2)[1] for text in after), f"{cls}.{field.name}"
