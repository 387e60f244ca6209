"""Indexes and headers of checkpoints: what is read, what is refused, which tensors stand for one."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onboarding.problem import Problem
from onboarding.weights.index import INDEX, pattern, read_checkpoint, read_header
from onboarding.weights.stored import logical_tensors


def index(table: Any, **more: Any) -> dict[str, bytes]:
    return {INDEX: json.dumps({"weight_map": table, **more}).encode()}


def header(**tensors: list[int]) -> bytes:
    facts = {n: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for n, shape in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **facts}).encode()
    return struct.pack("<Q", len(text)) + text


def test_names_files_and_size() -> None:
    files = index({"a.weight": "m-1.safetensors", "b.weight": "m-2.safetensors"}, metadata={"total_size": 12})
    found = read_checkpoint({**files, "m-1.safetensors": header(**{"a.weight": [2, 3]})})
    assert found is not None
    assert (found.files, found.total_bytes) == (2, 12)
    assert (found.entries["a.weight"].shape, found.entries["a.weight"].dtype) == ((2, 3), "BF16")
    assert found.entries["b.weight"].shape is None
    assert read_checkpoint({"config.json": b"{}"}) is None


@pytest.mark.parametrize(
    "files",
    [
        {INDEX: b"{"},
        {INDEX: b"[]"},
        index({}),
        index([]),
        index({"a": "../../etc/passwd"}),
        index({"a": "m.bin"}),
        index({"a": 3}),
        {"m.safetensors": b"\x01"},
        {"m.safetensors": struct.pack("<Q", 2**60) + b"{}"},
        {"m.safetensors": struct.pack("<Q", 2) + b"[]"},
        {"m.safetensors": struct.pack("<Q", 9) + b'{"a": {}}'},
        {"m.safetensors": header(a=[-1])},
        {**index({"a": "m-1.safetensors"}), "m-2.safetensors": header(a=[1])},
    ],
)
def test_a_broken_index_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(Problem) as caught:
        read_checkpoint(files)
    assert caught.value.kind == "weights-index-broken"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_a_header_or_a_problem(raw: bytes) -> None:
    with suppress(Problem):
        read_header("m.safetensors", raw)


def test_numbers_become_stars() -> None:
    assert pattern("model.layers.12.mlp.experts.7.w1.weight") == "model.layers.*.mlp.experts.*.w1.weight"
    assert pattern("blocks.3.conv1d.weight") == "blocks.*.conv1d.weight"


@pytest.mark.parametrize(
    ("names", "plain", "stored"),
    [
        (["q.weight", "q.weight_scale_inv"], "q.weight", "fp8 in blocks"),
        (["q.weight", "q.weight_scale"], "q.weight", "fp8 or int8 with scales"),
        (["q.weight", "q.weight_scale", "q.weight_zero_point"], "q.weight", "integers with scales"),
        (["q.weight_packed", "q.weight_scale", "q.weight_shape"], "q.weight", "int4, packed"),
        (["q.qweight", "q.qzeros", "q.scales", "q.g_idx"], "q.weight", "int4, packed (GPTQ or AWQ)"),
        (["e.gate_up_proj_blocks", "e.gate_up_proj_scales"], "e.gate_up_proj", "mxfp4 in blocks of 32"),
        (["q.weight", "q.weight_scale", "q.weight_scale_2"], "q.weight", "nvfp4 in blocks of 16"),
        (["q.weight", "q.weight.absmax", "q.weight.quant_state.bitsandbytes__nf4"], "q.weight", "bitsandbytes"),
        (["q.weight", "q.SCB"], "q.weight", "int8"),
    ],
)
def test_the_tensors_of_one_quantised_matrix_are_one(names: list[str], plain: str, stored: str) -> None:
    tensors, aside = logical_tensors([*names, "norm.weight"])
    assert aside == []
    by_name = {tensor.name: tensor for tensor in tensors}
    assert set(by_name) == {plain, "norm.weight"}
    assert (by_name[plain].parts, by_name[plain].stored) == (names, stored)
    assert by_name["norm.weight"].stored == ""


def test_learned_scales_are_parameters() -> None:
    names = ["layer.scales", "layer.weight_scale", "hc.scale", "attn.q_scale", "x_blocks", "b_scales"]
    tensors, aside = logical_tensors(names)
    assert [tensor.name for tensor in tensors] == names
    assert aside == []
    tensors, aside = logical_tensors(["q.weight", "q.weight_scale", "q.input_scale"])
    assert (len(tensors), aside) == (1, ["q.input_scale"])


def test_reading_an_index_needs_no_torch() -> None:
    script = (
        "import sys, onboarding.weights.index, onboarding.weights.report, onboarding.weights.stored;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
