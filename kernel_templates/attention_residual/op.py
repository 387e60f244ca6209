"""The attention residual template as a custom op, for one spec."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kernel_templates.attention_residual import template
from kernel_templates.attention_residual.spec import Spec
from kernel_templates.bind import Operator, bind, bind_template
from kernel_templates.configs import Chooser

CONFIGS = Path(__file__).parent / "configs"


@cache
def op(spec: Spec) -> Operator:
    """The operator of ``spec``, registered once a process and run with the family's configurations."""
    chooser = Chooser.from_folder(CONFIGS, name=spec.words())
    return bind(bind_template(template, spec), name=f"attention_residual_{spec.digest()}", choose_config=chooser)
