"""Tensors that stand for one quantised tensor: values, scales, zero points, code books. Free of torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

# (what the name ends in, the ending of the plain tensor, role); the first that fits counts
_ENDINGS: tuple[tuple[str, str, str], ...] = (
    (r"_scale_inv", "", "fp8 scale"),
    (r"\.weight_packed", ".weight", "int4 values"),
    (r"\.weight_global_scale", ".weight", "fp4 global scale"),
    (r"\.weight_scale_2", ".weight", "fp4 global scale"),
    (r"\.(input|k|v|q|output)_(global_)?scale", "", "activation scale"),
    (r"\.weight_scale", ".weight", "scale"),
    (r"\.weight_zero_point", ".weight", "zero point"),
    (r"\.weight_shape", ".weight", "int4 shape"),
    (r"\.weight_g_idx", ".weight", "order"),
    (r"\.qweight", ".weight", "packed values"),
    (r"\.qzeros", ".weight", "packed zeros"),
    (r"\.scales", ".weight", "group scale"),
    (r"\.g_idx", ".weight", "order"),
    (r"_blocks", "", "mxfp4 values"),
    (r"_scales", "", "mxfp4 scale"),
    (r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.[\w.]+)", ".weight", "bitsandbytes"),
    (r"\.SCB", ".weight", "int8 scale"),
)
_FORMATS = (
    ("mxfp4 values", "mxfp4 in blocks of 32"),
    ("fp4 global scale", "nvfp4 in blocks of 16"),
    ("int4 values", "int4, packed"),
    ("packed values", "int4, packed (GPTQ or AWQ)"),
    ("bitsandbytes", "bitsandbytes"),
    ("int8 scale", "int8"),
    ("fp8 scale", "fp8 in blocks"),
    ("zero point", "integers with scales"),
    ("scale", "fp8 or int8 with scales"),
)
READABLE = ("fp8 in blocks", "fp8 or int8 with scales")
"""What the runtime reads without help (``runtime/weights.py``)."""


@dataclass(kw_only=True)
class Logical:
    """One tensor as a model sees it, and the tensors in the file that stand for it."""

    name: str
    parts: list[str] = field(default_factory=list)
    stored: str = ""
    """Its format; empty for plain values."""


def logical_tensors(names: Iterable[str]) -> tuple[list[Logical], list[str]]:
    """Group a checkpoint's tensors.

    Returns:
        The logical tensors in the order of first appearance, and scales of activations, which belong to none.
    """
    known = set(names)
    groups: dict[str, Logical] = {}
    roles: dict[str, set[str]] = defaultdict(set)
    aside: list[str] = []
    for name in known if not isinstance(names, list) else names:
        plain, role = _role(name, known)
        if role == "activation scale":
            aside.append(name)
            continue
        group = groups.setdefault(plain, Logical(name=plain))
        group.parts.append(name)
        if role:
            roles[plain].add(role)
    for plain, found in roles.items():
        groups[plain].stored = next(
            words for role, words in (*_FORMATS, ("", "quantised")) if role in found or not role
        )
    return list(groups.values()), aside


def _role(name: str, known: set[str]) -> tuple[str, str]:
    for ending, replaced, role in _ENDINGS:
        match = re.search(ending + r"\Z", name)
        if match is None:
            continue
        plain = name[: match.start()] + replaced
        if role == "activation scale":
            # a learned parameter may be called so too: only beside quantised weights it is what it seems
            beside = name[: match.start()]
            return (plain, role) if _quantised(beside, known) else (name, "")
        if role == "mxfp4 values":
            return (plain, role) if f"{plain}_scales" in known else (name, "")
        # ``scales`` alone is no companion: something must hold the values
        holders = (plain, plain.removesuffix(".weight") + ".weight_packed", plain.removesuffix(".weight") + ".qweight")
        if plain != name and (
            any(h in known and h != name for h in holders) or _values(role) or f"{plain}_blocks" in known
        ):
            return plain, role
    return name, ""


def _values(role: str) -> bool:
    return role in ("int4 values", "packed values")


def _quantised(module: str, known: set[str]) -> bool:
    endings = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".weight_scale_2", ".qweight")
    return any(module + ending in known for ending in endings)
