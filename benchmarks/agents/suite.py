"""The evaluation suite: operators that no template family covers, each a file with a reference and a signature.

A file's ``SIGNATURE`` is read without running it; its whole text is the operator's reference, run in the sandbox only.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from kernel_templates.novel import Dim, NovelSpec, Signature, TensorSignature, Values

FOLDER = Path(__file__).parent / "operators"


def names() -> list[str]:
    """All operators, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str, dtype: str = "bfloat16") -> NovelSpec:
    """One operator's spec.

    Raises:
        ValueError: the file states no signature, or a wrong one.
    """
    source = (FOLDER / f"{name}.py").read_text()
    return NovelSpec(name=name.replace("_", " "), source=source, signature=signature_in(source).to_json(), dtype=dtype)


def signature_in(source: str) -> Signature:
    """The literal ``SIGNATURE`` of a reference, in its short form, as a checked signature.

    ``dims``: a size, or the fields of :class:`Dim`. ``inputs`` and ``outputs``: a shape, or the fields of
    :class:`TensorSignature`.
    """
    stated: dict[str, Any] | None = None
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "SIGNATURE" for t in node.targets):
            stated = ast.literal_eval(node.value)
    if stated is None:
        raise ValueError("the source states no SIGNATURE")
    signature = Signature(
        dims={name: _dim(entry) for name, entry in stated["dims"].items()},
        inputs=tuple(_tensor(name, entry) for name, entry in stated["inputs"].items()),
        outputs=tuple(_tensor(name, entry) for name, entry in stated["outputs"].items()),
    )
    signature.check()
    return signature


def _dim(entry: int | dict[str, Any]) -> Dim:
    if isinstance(entry, int):
        return Dim(full=entry)
    return Dim(**{**entry, "choices": tuple(entry.get("choices", ()))})


def _tensor(name: str, entry: list[Any] | dict[str, Any]) -> TensorSignature:
    fields: dict[str, Any] = {"shape": entry} if isinstance(entry, list) else dict(entry)
    fields["values"] = Values(**fields.get("values", {}))
    return TensorSignature(**{**fields, "name": name, "shape": tuple(fields["shape"])})
