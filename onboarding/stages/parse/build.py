"""From a configuration to a model at its full published size that holds no memory (FakeTensorMode)."""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from onboarding.problem import Problem
from onboarding.stages.parse.backbones import missing_backbones
from onboarding.stages.parse.constants import small_constants

_LANGUAGE_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)


def config_for(cls: Any, config: Any) -> Any:
    """The part of a composite configuration that a class takes: a text model's class wants the text part alone."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in _sub_configs(config) if isinstance(part, wanted)), config)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of libraries: what matters to the user is in the architecture's own ``warnings``."""
    loggers = {
        logging.getLogger("transformers"): logging.ERROR,
        logging.getLogger("torch._subclasses.fake_tensor"): logging.CRITICAL,
    }
    levels = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def build_config(config: dict[str, Any]) -> Any:
    """The transformers configuration object of a ``config.json``.

    Raises:
        Problem: ``unknown-model-type``, or ``config-invalid`` with what transformers says of it.
    """
    model_type = str(config.get("model_type", ""))
    try:
        cls = CONFIG_MAPPING[model_type]
    except KeyError:
        raise Problem(
            "custom-code-not-run",
            f"model_type {model_type!r} is not in transformers {transformers.__version__}",
            "the definition's own code is read, but running it is not supported yet",
            field="model_type",
        ) from None
    try:
        with quiet():
            return cls.from_dict(dict(config))
    except Exception as error:
        # any exception: validators of 300 configuration classes raise what they like
        raise Problem("config-invalid", "transformers refuses this configuration", _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def model_class(config: Any) -> tuple[type[nn.Module], list[str]]:
    """The class that serves a configuration: the one it names, else the one of transformers' mappings.

    Returns:
        The class, and warnings.

    Raises:
        Problem: ``no-language-model``: this model type has no causal or image-text class.
    """
    candidates = [
        getattr(modeling_auto, mapping).get(config.model_type)
        for mapping in _LANGUAGE_MAPPINGS
        if hasattr(modeling_auto, mapping)
    ]
    names = [name for found in candidates if found for name in ([found] if isinstance(found, str) else list(found))]
    named = (getattr(config, "architectures", None) or [None])[0]
    notes = []
    if named is not None and named not in names:
        notes.append(f"the configuration names class {named}, no language model of model_type {config.model_type}")
    elif named is not None:
        names.insert(0, named)
    # as it is now: in a forked warm process the package object that this file imported may have been replaced
    package = importlib.import_module("transformers")
    for name in names:
        cls = getattr(package, name, None)
        if cls is not None:
            return cls, notes
    raise Problem(
        "no-language-model",
        f"transformers has no language model for model_type {config.model_type!r}",
        "only causal and image-text language models are onboarded",
        field="model_type",
    )


def build_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, FakeTensorMode, list[str]]:
    """Instantiate the model at full size with fake tensors; parameters that its code keeps in fp32 stay fp32.

    Raises:
        Problem: ``model-not-built`` with the exception that the class raised.
    """
    cls, notes = model_class(config)
    config = config_for(cls, config)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for part in (config, *_sub_configs(config)):
        # weights that are quantised on disk have the shapes of the plain ones, which is what is counted here
        if getattr(part, "quantization_config", None) is not None:
            part.quantization_config = None
    try:
        with (
            quiet(),
            missing_backbones(),
            mode,
            small_constants(mode),
            no_init_weights(),
            patch.object(nn.Module, "_apply", _apply_to_fakes),
        ):
            model = _construct(cls, config, dtype)
            model.tie_weights()
            _keep_fp32(model)
    except Problem:
        raise
    except Exception as error:
        raise Problem(
            "model-not-built", f"{cls.__name__} cannot be built from this configuration", _first_line(error)
        ) from error
    return model, mode, notes


def _apply_to_fakes(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` by replacement: the stock one swaps tensors in place, which fake tensors refuse."""
    for child in module.children() if recurse else ():
        _apply_to_fakes(child, fn)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(fn(parameter.data), requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _construct(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """The class with the attention that transformers chooses for it: SDPA where the class supports it, else eager."""
    for implementation in (None, "sdpa"):
        try:
            return cls._from_config(config, dtype=dtype, attn_implementation=implementation)
        except (
            ValueError,
            ImportError,
        ):  # what the configuration names is not installed, or the class has no such path
            continue
    return cls._from_config(config, dtype=dtype, attn_implementation="eager")


def _sub_configs(config: Any) -> list[Any]:
    return [
        getattr(config, name) for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None
    ]


def _keep_fp32(model: nn.Module) -> None:
    """Do what ``from_pretrained`` does for ``_keep_in_fp32_modules``: those parameters are float32 in training."""
    patterns: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            patterns.update(getattr(module, attribute, None) or ())
    if not patterns:
        return
    escaped = (re.escape(pattern).replace(r"\*", ".*") for pattern in sorted(patterns))
    wanted = re.compile("|".join(rf"(^|\.){pattern}($|\.)" for pattern in escaped))
    for name, parameter in model.named_parameters():
        if wanted.search(name) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
