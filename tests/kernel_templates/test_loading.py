"""Loading candidate files."""

from __future__ import annotations

import inspect
import os
import sys

import pytest

from kernel_templates.loading import load_module, load_source


def test_every_load_is_fresh(tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text("VALUE = 1\nSEEN = []\n\n\ndef f():\n    return 11\n")
    first = load_module(path)
    stamp = path.stat()
    # same length, same time: a cached bytecode file or source line would go unnoticed
    path.write_text("VALUE = 2\nSEEN = []\n\n\ndef f():\n    return 22\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = load_module(path)
    assert (first.VALUE, second.VALUE) == (1, 2)
    assert (first.f(), second.f()) == (11, 22)
    assert first.SEEN is not second.SEEN
    assert sys.modules[first.__name__] is first
    assert not (tmp_path / "__pycache__").exists()
    assert "return 22" in inspect.getsource(second.f)


def test_source_lies_on_disk_under_its_digest(tmp_path):
    module = load_source("X = 5\n", tmp_path)
    assert module.X == 5
    assert [p.read_text() for p in tmp_path.iterdir()] == ["X = 5\n"]


def test_a_module_that_raises_leaves_nothing_behind(tmp_path):
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        load_source("1 / 0\n", tmp_path)
    with pytest.raises(SyntaxError):
        load_source("def\n", tmp_path)
    assert set(sys.modules) == before
