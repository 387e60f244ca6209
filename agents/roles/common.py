"""What the writing roles share: the fixed guide, and an operator as fenced data."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from agents.llm.prompt import Data
from agents.roles import examples
from kernel_templates.novel import NovelSpec, Signature
from kernel_templates.registry import load_spec

HERE = Path(__file__).parent
LONGEST_SOURCE = 40_000


@cache
def guide() -> str:
    """How candidates are written: the same words in every call, first in the prompt."""
    return (HERE / "guide.md").read_text() + "```python\n" + examples.load("rows").kernel + "```\n"


def operator_data(spec: dict[str, Any]) -> list[Data]:
    """An operator as data: what it computes and how it is called."""
    known = load_spec(spec)
    if isinstance(known, NovelSpec):
        return [
            Data(title="signature of the operator", text=signature_words(known), most=8_000),
            Data(title="reference of the operator", text=known.source, most=LONGEST_SOURCE),
        ]
    roles = [f"input {r.name}{', optional' * r.optional}" for r in known.inputs()]
    roles += [f"output {r.name}" for r in known.outputs()]
    text = "\n".join([known.words(), *roles])
    reference = Path(load_path(known.family, "reference")).read_text()
    return [
        Data(title="signature of the operator", text=text, most=8_000),
        Data(title="reference of the operator (with its spec's flags)", text=f"{spec}\n{reference}", most=24_000),
    ]


def load_path(family: str, part: str) -> str:
    """File of a family's module, found without importing it."""
    import kernel_templates

    return str(Path(kernel_templates.__file__).parent / family / f"{part}.py")


def signature_words(spec: NovelSpec) -> str:
    """The signature for a reader."""
    call: Signature = spec.call
    lines = [f"activation dtype: {spec.dtype} (float32 and bfloat16 must both work)", "dims:"]
    for name, dim in call.dims.items():
        choices = f", only {list(dim.choices)}" if dim.choices else f", any from {dim.least}"
        lines.append(f"  {name}: published size {dim.full}{choices}")
    for title, tensors in (("inputs:", call.inputs), ("outputs:", call.outputs)):
        lines.append(title)
        for t in tensors:
            kind = spec.dtype if t.dtype == "activation" else t.dtype
            grad = "" if t.differentiable and t.is_float else ", no gradient"
            lines.append(f"  {t.name}: [{', '.join(map(str, t.shape))}] {kind}{grad}")
    return "\n".join(lines)
