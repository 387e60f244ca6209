"""Writes kernel packages in the universal layout of Hugging Face ``kernels``; align and package both use it.

``kernels/<name>/build/torch-universal/`` holds a package of its own: ``__init__.py`` offers ``op``, the candidate
stands in ``_kernel.py`` beside copies of the binding, the configuration choice and the interpreter patches.
Torch is imported where shapes are worked out, not before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_templates
from kernel_templates.novel import NOVEL
from onboarding.stages.generate.compose import stated_tables
from onboarding.stages.package import bundle_files

TEMPLATES = Path(kernel_templates.__file__).parent
CARRIED = {
    "_bind.py": "bind.py",
    "_configs.py": "configs.py",
    "_interpreter.py": "interpreter.py",
    "_launch.py": "launch.py",
}

PACKAGE = '''\
"""{words}.

One verified operator: ``op(**tensors)`` with the inputs {inputs}. See metadata.json and the bundle's report.
"""

from pathlib import Path

import torch

from . import _interpreter

if not torch.cuda.is_available():
    _interpreter.activate()  # before the kernels are decorated

from . import _kernel
from ._bind import bind
from ._configs import Chooser
from ._launch import quicken

quicken(_kernel)
CONFIGS = Chooser.from_folder(Path(__file__).parent / "configs", "{name}")
op = bind(_kernel, name="{name}", choose_config=CONFIGS)

__all__ = ["op"]
'''


@dataclass(frozen=True, kw_only=True)
class KernelEntry:
    """One kernel to be written."""

    digest: str
    """Operator spec digest."""
    spec: dict[str, Any]
    words: str
    source: str
    """The candidate."""
    bindings: list[dict[str, Any]]
    verified: list[dict[str, Any]]
    """``[{"level", "device", "triton", "torch"}]``."""
    tuned: dict[str, Any] | None = None
    """Result of the tune stage: configurations for its device replace the family's."""
    config_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Device -> values that replace those of every row (alignment sets the interpreter's chunk)."""

    @property
    def name(self) -> str:
        """Unique to spec and source: two versions of a kernel can be loaded side by side."""
        source = hashlib.sha256(self.source.encode()).hexdigest()
        family = self.spec["family"].replace("_", "-")
        return f"onboard-{family}-{self.digest[:8]}-{source[:8]}"


def write_helpers(folder: Path) -> None:
    """Write what patches a model, verifies the bundle and compiles ahead."""
    for path in sorted(Path(bundle_files.__path__[0]).glob("*.py")):
        if path.name != "__init__.py":
            shutil.copyfile(path, folder / path.name)
    shutil.copyfile(TEMPLATES / "recording.py", folder / "recording.py")


def write_kernels(folder: Path, kernels: Sequence[KernelEntry]) -> list[dict[str, Any]]:
    """Write the packages under ``folder/kernels`` and return the entries for ``bundle.json``."""
    from kernel_templates.registry import load_spec
    from onboarding.stages.package.shapes import training_shapes

    index = []
    for kernel in kernels:
        path = f"kernels/{kernel.name}/build/torch-universal"
        package = folder / path
        package.mkdir(parents=True)
        _write_package(package, kernel)
        index.append(
            {
                "name": kernel.name,
                "digest": kernel.digest,
                "spec": kernel.spec,
                "words": kernel.words,
                "path": path,
                "bindings": kernel.bindings,
                "verified": kernel.verified,
                "shapes": training_shapes(load_spec(kernel.spec)),
            }
        )
    return index


def _write_package(package: Path, kernel: KernelEntry) -> None:
    from kernel_templates.registry import load_spec

    inputs = ", ".join(role.name for role in load_spec(kernel.spec).inputs())
    python_name = kernel.name.replace("-", "_")
    (package / "__init__.py").write_text(PACKAGE.format(words=kernel.words, inputs=inputs, name=python_name))
    (package / "_kernel.py").write_text(kernel.source)
    for target, source in CARRIED.items():
        shutil.copyfile(TEMPLATES / source, package / target)
    configs = package / "configs"
    configs.mkdir()
    for table in _tables(kernel):
        override = kernel.config_overrides.get(table["device"], {})
        for row in table["rows"]:
            row["config"].update(override)
        (configs / f"{table['device']}.json").write_text(json.dumps(table, indent=1) + "\n")
    if kernel.tuned is not None:
        table = tuned_table(kernel.tuned)
        (configs / f"{table['device']}.json").write_text(json.dumps(table, indent=1) + "\n")
    metadata = {
        "id": python_name,
        "name": kernel.name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (package / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def _tables(kernel: KernelEntry) -> list[dict[str, Any]]:
    """The family's configuration tables, or what a novel candidate states."""
    family = kernel.spec["family"]
    if family == NOVEL:
        return stated_tables(kernel.source)
    return [json.loads(path.read_text()) for path in sorted((TEMPLATES / family / "configs").glob("*.json"))]


def tuned_table(tuned: dict[str, Any]) -> dict[str, Any]:
    """A tune result as a configuration table."""
    rows = [{"bucket": json.loads(row["bucket"]), "config": row["config"]} for row in tuned["rows"]]
    return {"device": tuned["device"], "rows": rows}
