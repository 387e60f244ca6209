"""Choosing configurations."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from kernel_templates import configs
from kernel_templates.configs import Chooser, Row, choose


def _rows(*sizes):
    return [Row(bucket={"hidden": s}, config={"rows": s}) for s in sizes]


def test_exact_bucket():
    found = choose({"nvidia_h200": _rows(128, 4096)}, "nvidia_h200", {"hidden": 4096})
    assert (found.config, found.exact, found.note) == ({"rows": 4096}, True, "")


@pytest.mark.parametrize(("asked", "taken"), [(2304, 4096), (400, 128), (410, 4096), (1, 128), (10**9, 4096)])
def test_nearest_in_log_space(asked, taken):
    # a smaller row is twice as far: the boundary is where (a / 128)^2 = 4096 / a, at 406
    found = choose({"nvidia_h200": _rows(128, 4096)}, "nvidia_h200", {"hidden": asked})
    assert found.bucket == {"hidden": taken}
    assert not found.exact
    assert found.note == f"bucket {{'hidden': {taken}}} used for {{'hidden': {asked}}}"


def test_two_sizes_add_up():
    rows = [Row(bucket={"a": 16, "b": 16}, config={"n": 1}), Row(bucket={"a": 64, "b": 32}, config={"n": 2})]
    assert choose({"gpu": rows}, "gpu", {"a": 16, "b": 64}).config == {"n": 1}
    assert choose({"gpu": rows}, "gpu", {"a": 64, "b": 16}).config == {"n": 2}


def test_an_unknown_gpu_takes_a_gpu_and_says_so():
    tables = {"interpreter": _rows(1), "nvidia_a100": _rows(2), "nvidia_h200": _rows(4)}
    found = choose(tables, "nvidia_h200_nvl", {"hidden": 4})
    assert found.config == {"rows": 4}
    assert found.note == "configuration of nvidia_h200 used on nvidia_h200_nvl"


def test_the_interpreter_never_takes_a_gpus_tiles():
    with pytest.raises(LookupError, match="no configuration for interpreter; there are: nvidia_h200"):
        choose({"nvidia_h200": _rows(4)}, "interpreter", {"hidden": 4})
    with pytest.raises(LookupError):
        choose({"interpreter": _rows(4)}, "nvidia_h200", {"hidden": 4})


def test_folder(tmp_path, caplog):
    (tmp_path / "interpreter.json").write_text(
        json.dumps({"device": "interpreter", "rows": [{"bucket": {"hidden": 64}, "config": {"rows": 8}}]})
    )
    chooser = Chooser.from_folder(tmp_path, name="norm")
    with caplog.at_level(logging.INFO, logger=configs.__name__):
        assert chooser({"hidden": 64}, torch.device("cpu")) == {"rows": 8}
        assert not caplog.records
        chooser({"hidden": 65}, torch.device("cpu"))
        chooser({"hidden": 65}, torch.device("cpu"))
    assert [r.getMessage() for r in caplog.records] == ["norm: bucket {'hidden': 64} used for {'hidden': 65}"]


def test_malformed_file_is_named(tmp_path):
    (tmp_path / "nvidia_h200.json").write_text('{"device": "nvidia_h200", "rows": [{"bucket": 3}]}')
    with pytest.raises(ValueError, match=r"nvidia_h200\.json is not a table"):
        configs.load(tmp_path)
