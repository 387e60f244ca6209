"""Makes a plain ``torch.nn.Module`` a causal language model in the eyes of everything that follows.

``"entry_point": "module:Class"`` in ``config.json`` names the class. It is built from the configuration's other fields:
as keyword arguments where its parameters carry their names, else as one configuration object. Its forward takes token
ids ``[B, T]`` and gives logits ``[B, T, V]`` (alone, first of a tuple, or under ``logits``). Module names stay what
they are: the adapter is a subclass, not a wrapper.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onboarding.problem import Problem

RESERVED = {
    "model_type", "architectures", "entry_point", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "_name_or_path",
}  # fmt: skip
"""Fields that speak of the definition, not to the class."""


def adapt(cls: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """The model class and the configuration class for a plain module.

    Raises:
        Problem: ``code-wrong-class`` or ``code-arguments``.
    """
    from transformers import PreTrainedConfig, PreTrainedModel

    if not issubclass(cls, nn.Module):
        raise Problem("code-wrong-class", f"{cls.__name__} is no torch.nn.Module", "", field="entry_point")
    if PreTrainedModel in cls.__mro__:
        if cls.config_class is None:
            raise Problem(
                "code-wrong-class",
                f"{cls.__name__} names no configuration class",
                "set config_class",
                field="entry_point",
            )
        return cls, cls.config_class
    names = tuple(name for name in config if name not in RESERVED)
    _check_arguments(cls, names)
    config_class = type(f"{cls.__name__}Config", (PreTrainedConfig,), {"model_type": config["model_type"]})
    members = {"given": names, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Adapted, cls), members), config_class


def _takes_config(cls: Any, names: tuple[str, ...]) -> bool:
    """Whether the constructor wants one object: one required parameter that is no field of the configuration."""
    needed = [p for p in _parameters(cls) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1 and needed[0].name not in names


def _parameters(cls: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(cls.__init__).parameters.values())[1:]


def _check_arguments(cls: Any, names: tuple[str, ...]) -> None:
    if _takes_config(cls, names):
        return
    missing = [
        p.name
        for p in _parameters(cls)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in names
    ]
    if missing:
        raise Problem(
            "code-arguments",
            f"{cls.__name__} needs {', '.join(missing)}, which config.json does not give",
            "every parameter without a default must be a field of config.json",
            field=missing[0],
        )


def _arguments(cls: Any, config: Any, names: tuple[str, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the plain class's constructor is called with."""
    if _takes_config(cls, names):
        return (config,), {}
    parameters = _parameters(cls)
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = {p.name for p in parameters}
    return (), {name: getattr(config, name) for name in names if everything or name in wanted}


class Adapted:
    """What parser, twin and alignment ask of a transformers model, for a plain module."""

    given: tuple[str, ...] = ()
    """Fields of the configuration that may be arguments."""
    config_class: Any = None
    config: Any = None
    base_model_prefix = ""
    _keep_in_fp32_modules_strict: Any = None

    def __init__(self: Any, config: Any) -> None:
        plain: Any = type(self).__mro__[2]
        args, kwargs = _arguments(plain, config, self.given)
        plain.__init__(self, *args, **kwargs)
        self.config = config

    @classmethod
    def _from_config(cls: Any, config: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
        """Build the module; floating parameters are made in ``dtype``, fp32 ones that the code asks for stay so."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or before)
        try:
            return cls(config)
        finally:
            torch.set_default_dtype(before)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return False

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """The module ties what it ties in its constructor."""

    def get_decoder(self: Any) -> Any:
        """The whole module: it has no other parts."""
        return self

    def get_input_embeddings(self: Any) -> nn.Embedding | None:
        """The embedding with the most rows."""
        found = [m for m in self.modules() if isinstance(m, nn.Embedding)]
        return max(found, key=lambda m: m.num_embeddings, default=None)

    def get_output_embeddings(self: Any) -> nn.Linear | None:
        """The linear layer with one output a token of the vocabulary."""
        embedding = Adapted.get_input_embeddings(self)
        rows = embedding.num_embeddings if embedding is not None else getattr(self.config, "vocab_size", -1)
        return next((m for m in self.modules() if isinstance(m, nn.Linear) and m.out_features == rows), None)

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        """Logits ``[B, T, V]`` and, with labels, the next-token cross entropy in fp32."""
        from transformers.modeling_outputs import CausalLMOutput

        plain: Any = type(self).__mro__[2]
        result = plain.forward(self, input_ids)
        logits = getattr(result, "logits", result[0] if isinstance(result, tuple | list) else result)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            raise Problem(
                "code-wrong-output",
                f"{type(self).__name__} returns {type(logits).__name__}, not logits of [batch, tokens, vocabulary]",
                "return the logits, a tuple that starts with them, or an object with .logits",
            )
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
