"""The model definitions that ship with Onboard, found in a checkout and in an installed package. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onboarding.problem import Problem

_HERE = Path(__file__).resolve().parent


def examples_folder() -> Path:
    """The folder with one sub-folder an example.

    Raises:
        FileNotFoundError: neither a checkout nor package data is there.
    """
    for folder in (_HERE / "_examples", _HERE.parent / "examples"):
        if (folder / "kimi-linear" / "config.json").is_file():
            return folder
    raise FileNotFoundError("the examples are not installed")


def example_names() -> list[str]:
    """Names that ``onboard submit`` and ``POST /v1/jobs`` accept in place of files, sorted."""
    return sorted(path.parent.name for path in examples_folder().glob("*/config.json"))


def example_path(name: str) -> Path:
    """The folder of an example.

    Raises:
        Problem: there is no example of this name (``unknown-example``).
    """
    names = example_names()
    if name not in names:
        raise Problem(
            "unknown-example", f"there is no example {name!r}", f"there are: {', '.join(names)}", field="example"
        )
    return examples_folder() / name


def example_files(name: str) -> dict[str, bytes]:
    """What submitting an example submits: its ``config.json``.

    Raises:
        Problem: there is no example of this name (``unknown-example``).
    """
    return {"config.json": (example_path(name) / "config.json").read_bytes()}


def example_config(name: str) -> dict[str, Any]:
    """An example's configuration.

    Raises:
        Problem: there is no example of this name (``unknown-example``).
    """
    config: dict[str, Any] = json.loads(example_files(name)["config.json"])
    return config
