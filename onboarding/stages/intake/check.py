"""Checking a model definition before anything is built from it. Free of torch and of the definition's own code.

The API calls :func:`check_definition` before a job exists; the intake stage calls it again on the stored artifact.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from onboarding.examples import example_config, example_files, example_names
from onboarding.problem import Problem
from onboarding.stages.intake.archive import CAPS, Collector, is_archive, normalised_tar, read_folder, too_large, unpack
from onboarding.stages.intake.code import defined_classes, find_classes, read_code
from onboarding.stages.intake.config import check_fields, check_model_type, read_config
from onboarding.stages.intake.model_types import known_classes, known_model_types

Source = Literal["config", "folder", "archive", "example"]
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".msgpack", ".h5")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tiktoken.model")


@dataclass(frozen=True, kw_only=True)
class CheckedDefinition:
    """A definition that passed every check."""

    name: str | None
    """What it calls itself: an example's name, the archive's top folder, or ``_name_or_path``."""
    model_type: str
    source: Source
    digest: str
    """sha256 over the sorted (path, content digest) list."""
    config: dict[str, Any]
    files: dict[str, bytes]
    has_code: bool
    runs_code: bool
    """Its own code serves it; else transformers' class of its model type does."""
    has_tokenizer: bool
    imports: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    suspicious: tuple[str, ...] = ()

    def stored(self) -> tuple[str, str, bytes]:
        """How a job keeps it: (file name, media type, content); ``config.json`` itself if that is all there is."""
        if set(self.files) == {"config.json"}:
            return "config.json", "application/json", self.files["config.json"]
        return "definition.tar", "application/x-tar", normalised_tar(self.files)


def content_digest(files: dict[str, bytes]) -> str:
    """sha256 over the sorted (path, sha256 of the content) list of a definition's files."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(name.encode() + b"\0" + hashlib.sha256(files[name]).hexdigest().encode() + b"\n")
    return total.hexdigest()


def _without_top_folder(files: dict[str, bytes]) -> tuple[dict[str, bytes], str | None]:
    """Archives of a folder hold the folder: its name is a hint, not a part of the paths."""
    tops = {name.split("/", 1)[0] for name in files}
    if len(tops) != 1 or any("/" not in name for name in files):
        return files, None
    return {name.split("/", 1)[1]: content for name, content in files.items()}, tops.pop()


def _read(source: dict[str, bytes] | Path | bytes) -> tuple[dict[str, bytes], Source]:
    if isinstance(source, dict):
        collector = Collector()
        for name, content in source.items():
            collector.count_entry()
            collector.add(name, content)
        return collector.files, "config" if len(source) == 1 else "folder"
    if isinstance(source, Path):
        if source.is_dir():
            return read_folder(source), "folder"
        if not source.is_file():
            raise Problem(
                "no-such-path", f"{source} does not exist", "give a config.json, a folder, an archive or an example"
            )
        if source.stat().st_size > CAPS.total_bytes:
            raise too_large(f"the file {source.name!r}", CAPS.total_bytes)
        if source.suffix == ".json":
            return {"config.json": source.read_bytes()}, "config"
        source = source.read_bytes()
    if is_archive(source):
        return unpack(source), "archive"
    return {"config.json": source}, "config"


def _refuse_pickles(files: dict[str, bytes]) -> None:
    for name in sorted(files):
        if name.lower().endswith(PICKLES):
            raise Problem(
                "pickled-weights",
                f"{name} may run code when it is loaded",
                "weights are taken as safetensors only; for onboarding the definition is enough",
                file=name,
            )


def check_definition(source: dict[str, bytes] | Path | bytes) -> CheckedDefinition:
    """Read and check a model definition: files by path, a folder, an archive, or a bare ``config.json``.

    Raises:
        Problem: what is wrong and where; the kind is stable (``unsafe-path``, ``pickled-weights``, ``config-not-json``,
            ``config-no-model-type``, ``unknown-model-type``, ``config-field-missing``, ``config-wrong-type``,
            ``config-out-of-range``, ``code-syntax-error`` ...).
    """
    files, kind = _read(source)
    files, folder = _without_top_folder(files)
    _refuse_pickles(files)
    if "config.json" not in files:
        there = ", ".join(sorted(files)[:5]) or "nothing"
        raise Problem("no-config", "the definition has no config.json", f"it holds {there}", field="config.json")
    config = read_config(files["config.json"])
    has_code = any(name.endswith(".py") for name in files)
    code = read_code(files)
    if has_code and "model_type" not in config and "entry_point" in config:
        config["model_type"] = str(config["entry_point"]).rpartition(":")[2].lower()
    model_type = check_model_type(config, has_code)
    runs_code = has_code and needs_its_code(config, files)
    if runs_code:
        find_classes(config, files)
    check_fields(config, model_type, own_class=runs_code)
    example = _example_of(config) if len(files) == 1 else None
    named = config.get("_name_or_path")
    name = (
        example
        or folder
        or (named.rstrip("/").rsplit("/", 1)[-1] if isinstance(named, str) and named.strip("/") else None)
    )
    return CheckedDefinition(
        name=name,
        model_type=model_type,
        source="example" if example else kind,
        digest=content_digest(files),
        config=config,
        files=files,
        has_code=has_code,
        runs_code=runs_code,
        has_tokenizer=any(name.rsplit("/", 1)[-1] in TOKENIZERS for name in files),
        imports=code.imports,
        optional=code.optional,
        suspicious=code.suspicious,
    )


def needs_its_code(config: dict[str, Any], files: dict[str, bytes]) -> bool:
    """Whether a definition with code is served by it.

    It is when it says so (``entry_point``), when transformers does not know its model type, and when it defines the
    class that it names and transformers has none of that name. Published repositories often carry code for models
    that transformers has since taken in, or for a tokenizer alone: transformers' own class serves those.
    """
    if "entry_point" in config or config.get("model_type") not in known_model_types():
        return True
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name in known_classes():
        return False
    return any(place.endswith(f":{name}") for place in defined_classes(files))


@cache
def _examples() -> dict[str, dict[str, Any]]:
    return {name: example_config(name) for name in example_names()}


def _example_of(config: dict[str, Any]) -> str | None:
    return next((name for name, example in _examples().items() if example == config), None)


def find_definition(text: str) -> CheckedDefinition:
    """What a user named on the command line: a path, or an example where no such path exists.

    Raises:
        Problem: neither, or the definition is refused.
    """
    path = Path(text)
    if not path.exists() and text in example_names():
        return check_definition(example_files(text))
    if not path.exists() and "/" not in text:
        raise Problem(
            "no-such-path", f"{text!r} is neither a path nor an example", f"examples: {', '.join(example_names())}"
        )
    return check_definition(path)
