"""Reading a definition's code with ast: imports, what it hides, and which classes serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onboarding.problem import Problem
from onboarding.stages.intake.check import check_definition
from onboarding.stages.intake.code import find_classes, read_code

MODELS = Path(__file__).parents[1] / "custom_models"
AUTO = {"AutoModelForCausalLM": "m.XForCausalLM"}
MODELING = b"class XConfig: pass\nclass XForCausalLM: pass\n"


def definition(config: dict[str, Any], **files: str) -> dict[str, bytes]:
    base = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    sources = {f"{name}.py": text.encode() for name, text in files.items()}
    return {"config.json": json.dumps({**base, **config}).encode(), **sources}


def refusal(files: dict[str, bytes]) -> Problem:
    with pytest.raises(Problem) as caught:
        check_definition(files)
    return caught.value


@pytest.mark.parametrize(
    ("name", "model_type", "imports", "optional"),
    [
        ("nimbus", "nimbus", ("einops", "flash_attn", "torch", "transformers"), ("flash_attn",)),
        ("strata", "strata", ("causal_conv1d", "mamba_ssm", "torch", "transformers"), ()),
        ("kappa", "kappa", ("fla", "torch", "transformers"), ()),
        ("plain", "tinyformer", ("torch",), ()),
    ],
)
def test_what_a_definition_needs(
    name: str, model_type: str, imports: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    checked = check_definition(MODELS / name)
    assert (checked.model_type, checked.imports, checked.optional) == (model_type, imports, optional)
    assert checked.runs_code
    assert checked.suspicious == ()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os\nos.system('x')", "m.py:2 os.system()"),
        ("from os import system as s\ns('x')", "m.py:2 os.system()"),
        ("import os as o\ndef f():\n    o.popen('x')", "m.py:3 os.popen()"),
        ("import subprocess", "m.py:1 import subprocess"),
        ("from urllib.request import urlopen\nurlopen('x')", "m.py:1 import urllib"),
        ("import torch\ntorch.load('x')", "m.py:2 torch.load()"),
        ("().__class__.__base__.__subclasses__()", "m.py:1 __subclasses__"),
        ("exec('x')", "m.py:1 exec()"),
        ("__import__('os')", "m.py:1 __import__()"),
        (
            "from torch.utils.cpp_extension import load_inline as li\nli('x')",
            "m.py:2 torch.utils.cpp_extension.load_inline()",
        ),
    ],
)
def test_suspicious_calls_are_found_under_any_name(code: str, found: str) -> None:
    assert found in read_code({"m.py": code.encode()}).suspicious


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.path.join('a')\nos.environ.get('a')",
        "import inspect\ninspect.signature(len)",
        "model.eval()",
        "x.compile()",
    ],
)
def test_ordinary_code_is_not_suspicious(code: str) -> None:
    assert read_code({"m.py": code.encode()}).suspicious == ()


def test_relative_imports_lead_to_files() -> None:
    files = {
        "a.py": b"from .b import B\nfrom . import b\nfrom .sub.c import C\nfrom .sub import c\n",
        "b.py": b"",
        "sub/c.py": b"from ..b import B\nfrom .d import D\n",
        "sub/d.py": b"",
    }
    assert read_code(files).imports == ()
    for broken, lacking, line in (
        (b"\nfrom .gone import X", "gone", 2),
        (b"from ..b import X", "..b", 1),
        (b"from . import gone", "gone", 1),
    ):
        with pytest.raises(Problem) as caught:
            read_code({**files, "a.py": broken})
        assert caught.value.kind == "code-file-missing"
        assert lacking in caught.value.title
        assert (caught.value.extra["file"], caught.value.extra["line"]) == ("a.py", line)
    assert read_code({"a.py": b"try:\n    from .gone import X\nexcept ImportError:\n    X = None\n"}).imports == ()


def test_long_and_deep_code_is_read_or_refused() -> None:
    assert read_code({"m.py": ("x = " + "+".join(["1"] * 900)).encode()}).suspicious == ()
    with pytest.raises(Problem) as caught:
        read_code({"m.py": ("(" * 5000 + ")" * 5000).encode()})
    assert caught.value.kind == "code-syntax-error"


@pytest.mark.parametrize(
    ("config", "model", "own_config", "entry"),
    [
        ({"auto_map": {"AutoConfig": "m.XConfig", **AUTO}}, "m:XForCausalLM", "m:XConfig", False),
        ({"auto_map": {"AutoModelForCausalLM": "some/repo--m.XForCausalLM"}}, "m:XForCausalLM", "", False),
        ({"architectures": ["XForCausalLM"]}, "m:XForCausalLM", "", False),
        ({"entry_point": "m:XForCausalLM", "auto_map": {"AutoConfig": "m.Other"}}, "m:XForCausalLM", "", True),
    ],
)
def test_classes_are_found(config: dict[str, Any], model: str, own_config: str, entry: bool) -> None:
    found = find_classes(config, {"m.py": MODELING})
    assert (found.model, found.config, found.entry) == (model, own_config, entry)


@pytest.mark.parametrize(
    ("config", "kind", "field"),
    [
        ({}, "code-no-class", "auto_map"),
        ({"auto_map": 3}, "config-wrong-type", "auto_map"),
        ({"auto_map": {"AutoModelForCausalLM": 3}}, "config-wrong-type", "auto_map.AutoModelForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "n.XForCausalLM"}}, "code-no-class", "auto_map.AutoModelForCausalLM"),
        ({"auto_map": {"AutoModel": "m.XModel"}}, "code-no-class", "auto_map"),
        ({"entry_point": "m.XForCausalLM"}, "config-wrong-type", "entry_point"),
        ({"entry_point": "m:Nothing"}, "code-no-class", "entry_point"),
        ({"entry_point": ["m:X"]}, "config-wrong-type", "entry_point"),
    ],
)
def test_a_class_that_is_not_there_is_named(config: dict[str, Any], kind: str, field: str) -> None:
    problem = refusal(definition({"model_type": "brand_new", **config}, m=MODELING.decode()))
    assert (problem.kind, problem.extra["field"]) == (kind, field)


def test_transformers_own_class_serves_what_it_knows() -> None:
    from onboarding.examples import example_config

    llama = example_config("llama-3.1-8b")
    code = {"modeling_llama.py": b"class LlamaForCausalLM: pass\nclass Mine: pass\n"}
    auto = {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}

    def runs(config: dict[str, Any]) -> bool:
        return check_definition({"config.json": json.dumps(config).encode(), **code}).runs_code

    assert not runs({**llama, **auto})
    assert runs({**llama, "entry_point": "modeling_llama:Mine"})
    assert runs({**llama, "architectures": ["Mine"]})
    tokenizer = {"config.json": json.dumps(llama).encode(), "tokenization_x.py": b"class T: pass"}
    assert not check_definition(tokenizer).runs_code
