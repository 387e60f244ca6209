"""Imports a definition's code and tells transformers of its classes. Runs in the sandbox only.

After :func:`install` the definition's model type is one like any other: ``AutoConfig.for_model`` and
``AutoModelForCausalLM`` find its classes, so parser, twin and alignment need no second path.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from onboarding.custom_code import compat
from onboarding.custom_code.definition import CONFIG, CONFINED, PACKAGE
from onboarding.problem import Problem
from onboarding.stages.intake.code import Classes, find_classes

PACKAGES = Path(__file__).with_name("packages")
"""Stand-ins for optional packages; last on the path, so that an installed package wins."""


def install(code: Path) -> None:
    """Import the definition's classes and register them under its model type.

    Args:
        code: folder of its Python files and its checked ``config.json``.

    Raises:
        RuntimeError: called outside the sandbox.
        Problem: ``code-no-class`` or ``code-wrong-class``.
        BaseException: whatever the code raises on import.
    """
    if not CONFINED.items() <= os.environ.items():
        raise RuntimeError("a definition's own code runs in the sandbox only")
    config = json.loads((code / CONFIG).read_text())
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    compat.install()
    _add_package(code)
    files = {path.relative_to(code).as_posix(): path.read_bytes() for path in sorted(code.rglob("*.py"))}
    classes = find_classes(config, files)
    model = _import(classes.model)
    if classes.entry:
        from onboarding.custom_code.entry import adapt

        model, config_class = adapt(model, config)
    else:
        config_class = _config_class(classes, model)
    _register(str(config["model_type"]), config_class, model)


def _add_package(code: Path) -> None:
    """The folder as package, and its files by their bare names too, as the same modules."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(code)]
    package.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
    package.__spec__.submodule_search_locations = [str(code)]
    sys.modules[PACKAGE] = package
    own = {path.stem for path in code.iterdir() if path.suffix == ".py" or path.is_dir()}
    taken = set(sys.stdlib_module_names) | {name for name in own if PathFinder.find_spec(name) is not None}
    sys.meta_path.insert(0, _BareNames(own - taken))


class _BareNames:
    """``import layers`` in a definition that holds ``layers.py`` is ``import onboard_definition.layers``.

    It comes before the other finders, so that ``layers.parts`` is not found a second time in the package's folder.
    """

    def __init__(self, own: set[str]) -> None:
        self.own = own

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.own:
            return None
        return ModuleSpec(name, _Alias())  # type: ignore[arg-type]  # as above


class _Alias:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{PACKAGE}.{spec.name}")
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib set the bare name's


def _import(place: str) -> Any:
    """The class at ``module:Class`` of the definition.

    Raises:
        Problem: ``code-no-class``: the file does not define it after all (it is deleted, or made on a condition).
    """
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
    if not isinstance(found, type):
        raise Problem("code-no-class", f"{module}.py has no class {name} once it is imported", "", field=place)
    return found


def _config_class(classes: Classes, model: Any) -> Any:
    from transformers import PreTrainedConfig, PreTrainedModel

    if not issubclass(model, PreTrainedModel):
        raise Problem(
            "code-wrong-class",
            f"{classes.model} is no PreTrainedModel",
            f'for a plain torch module give "entry_point": "{classes.model}" in config.json',
            field=classes.model,
        )
    found = _import(classes.config) if classes.config else getattr(model, "config_class", None)
    if found is None or not issubclass(found, PreTrainedConfig):
        raise Problem(
            "code-wrong-class",
            f"{classes.model} names no configuration class",
            "set config_class, or name it under auto_map.AutoConfig in config.json",
            field=classes.config or classes.model,
        )
    return found


def _register(model_type: str, config_class: Any, model: Any) -> None:
    """Into both of transformers' tables: by class, and by name for those who ask for a name."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto import modeling_auto

    config_class.model_type = model_type
    model.config_class = config_class
    compat.adapt_class(model)
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model, exist_ok=True)
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = model.__name__
    setattr(transformers, model.__name__, model)
