"""Checking definitions: each fault has its stable kind and names its place."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onboarding.examples import example_config, example_files, example_names, example_path
from onboarding.problem import Problem
from onboarding.stages.intake.archive import normalised_tar
from onboarding.stages.intake.check import check_definition, content_digest, find_definition

LLAMA = example_config("llama-3.1-8b")


def config(**changes: Any) -> bytes:
    return json.dumps({k: v for k, v in {**LLAMA, **changes}.items() if v != "absent"}).encode()


def refusal(source: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        check_definition(source)
    return caught.value


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"{", "config-not-json"),
        (b"", "config-not-json"),
        (b"\xff\xfe{}", "config-not-json"),
        (b"[1, 2]", "config-not-an-object"),
        (b"null", "config-not-an-object"),
        (b'{"model_type": "llama", "x": NaN}', "config-not-finite"),
        (b'{"model_type": "llama", "x": -Infinity}', "config-not-finite"),
        (b'{"model_type": "llama", "x": 1e999}', "config-not-finite"),
        (b'{"model_type": "llama", "model_type": "qwen3"}', "config-duplicate-field"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "config-too-deep"),
        (b'{"x": ' + b"9" * 5000 + b"}", "config-not-json"),
        (b"{}", "config-no-model-type"),
        (b'{"model_type": 3}', "config-wrong-type"),
        (b'{"model_type": "../x"}', "config-wrong-type"),
        (b'{"model_type": "no_such_thing"}', "unknown-model-type"),
        (config(num_hidden_layers="absent"), "config-field-missing"),
        (config(num_hidden_layers="many"), "config-wrong-type"),
        (config(num_hidden_layers=True), "config-wrong-type"),
        (config(num_hidden_layers=2.5), "config-wrong-type"),
        (config(hidden_size=[4096]), "config-wrong-type"),
        (config(num_hidden_layers=-1), "config-out-of-range"),
        (config(num_hidden_layers=0), "config-out-of-range"),
        (config(num_hidden_layers=10**9), "config-out-of-range"),
        (config(vocab_size=10**30), "config-out-of-range"),
        (config(num_attention_heads=-8), "config-out-of-range"),
    ],
)
def test_each_fault_has_its_kind(raw: bytes, kind: str) -> None:
    problem = refusal({"config.json": raw})
    assert problem.kind == kind
    assert problem.title


def test_the_place_is_named() -> None:
    assert refusal({"config.json": b'{\n "a": 1,\n "b" 2}'}).extra["line"] == 3
    assert refusal({"config.json": config(num_hidden_layers="many")}).extra["field"] == "num_hidden_layers"


def test_another_file_of_the_model_is_recognised() -> None:
    generation = b'{"bos_token_id": 1, "eos_token_id": 2, "do_sample": true, "temperature": 0.6, "top_p": 0.95}'
    assert "generation_config.json" in refusal({"config.json": generation}).detail
    with_type = b'{"model_type": "kimi_linear", "eos_token_id": 2, "do_sample": true}'
    problem = refusal({"config.json": with_type})
    assert problem.extra["field"] == "hidden_size" or "num_hidden_layers" in problem.extra["missing"]
    assert "generation_config.json" in problem.detail


def test_near_names_are_suggested() -> None:
    assert "kimi_linear" in refusal({"config.json": b'{"model_type": "kimi_linaer"}'}).extra["nearest"]


def test_nested_text_config_is_checked() -> None:
    glm = example_config("glm-5.3-flash")
    glm["text_config"]["num_hidden_layers"] = "many"
    assert refusal({"config.json": json.dumps(glm).encode()}).extra["field"] == "text_config.num_hidden_layers"
    glm["text_config"] = 7
    assert refusal({"config.json": json.dumps(glm).encode()}).extra["field"] == "text_config"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights/model.PT", "optimizer.pkl", "x.ckpt"])
def test_pickled_weights_are_refused(name: str) -> None:
    problem = refusal({"config.json": config(), name: b"\x80\x04."})
    assert (problem.kind, problem.extra["file"]) == ("pickled-weights", name)


def test_a_definition_needs_a_config() -> None:
    assert refusal({"modeling_x.py": b"import torch"}).kind == "no-config"


def test_code_is_read_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"import numpy as np, einops\nfrom .configuration_x import X\nimport os\nopen({str(marker)!r}, 'w')\n"
    code += "os.system('x')\nclass Model: pass\n"
    files = {
        "config.json": b'{"model_type": "brand_new", "hidden_size": 64, "num_hidden_layers": 2, "entry_point": '
        b'"modeling_x:Model"}',
        "modeling_x.py": code.encode(),
        "configuration_x.py": b"import transformers",
    }
    checked = check_definition(files)
    assert checked.imports == ("einops", "numpy", "transformers")
    assert "modeling_x.py:5 os.system()" in checked.suspicious
    assert checked.has_code
    assert not marker.exists()
    problem = refusal({**files, "modeling_x.py": b"x = 1\ndef f(:\n"})
    assert (problem.kind, problem.extra["file"], problem.extra["line"]) == ("code-syntax-error", "modeling_x.py", 2)
    assert refusal({**files, "modeling_x.py": b"x\x00"}).kind == "code-syntax-error"


@pytest.mark.parametrize("name", example_names())
def test_every_example_passes_in_every_form(name: str) -> None:
    by_name = find_definition(name)
    from_folder = check_definition(example_path(name) / "config.json")
    from_archive = check_definition(normalised_tar({f"{name}/config.json": example_files(name)["config.json"]}))
    assert by_name.name == name
    assert by_name.source == "example"
    assert by_name.digest == from_folder.digest == from_archive.digest == content_digest(example_files(name))


def test_the_digest_depends_on_paths_and_contents() -> None:
    base = content_digest({"a": b"1", "b": b"2"})
    assert base == content_digest({"b": b"2", "a": b"1"})
    assert len({base, content_digest({"a": b"2", "b": b"1"}), content_digest({"a": b"1"})}) == 3


def test_an_unknown_example_or_path() -> None:
    for text in ("no-such-model", "no/such/path"):
        with pytest.raises(Problem) as caught:
            find_definition(text)
        assert caught.value.kind == "no-such-path"


def test_checking_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from onboarding.stages.intake.check import find_definition; find_definition('kimi-linear');"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(LLAMA)), JSON)
def test_any_value_in_any_field_passes_or_is_a_problem(field: str, value: Any) -> None:
    with suppress(Problem):
        checked = check_definition({"config.json": json.dumps({**LLAMA, field: value}).encode()})
        assert checked.config[field] == value


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_as_config_are_a_problem(raw: bytes) -> None:
    with pytest.raises(Problem):
        check_definition({"config.json": raw})
