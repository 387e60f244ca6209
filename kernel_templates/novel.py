"""Specs of operators that no template family covers: a reference's source and the signature it is called with.

The source is untrusted text (a submitted model's code, or a language model's): it is only ever run in the sandbox, see
``onboarding/stages/judge/novel.py``. It defines either ``reference(**tensors)`` in plain torch, or a module class
``Reference(**dims)`` whose parameters are inputs by name (dots become underscores). Free of torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole

NOVEL = "novel"
LONGEST_SOURCE = 64 * 1024
ACTIVATION = "activation"
"""Dtype of a tensor that follows the spec's dtype."""
INTEGERS = ("int64", "int32", "bool")
DTYPES = (ACTIVATION, "float32", *INTEGERS)
KINDS = ("normal", "uniform", "log_sigmoid", "softmax", "integers", "distinct")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}\Z")
_TERM = re.compile(r"(?:(\d+)\*)?([A-Za-z][A-Za-z0-9_]*)\Z")

Size = int | str
"""A size of a shape: a number, a dim's name, or ``K*NAME``."""


@dataclass(frozen=True, kw_only=True)
class Dim:
    """A size that may vary from call to call."""

    full: int
    """Published size."""
    least: int = 1
    most: int = 0
    """Largest size to try; ``full`` by default."""
    choices: tuple[int, ...] = ()
    """The only sizes there are, where an operator is not defined for others."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """Where a tensor's values come from."""

    kind: Literal["normal", "uniform", "log_sigmoid", "softmax", "integers", "distinct"] = "normal"
    """``log_sigmoid`` of a normal, ``softmax`` over the last dim, ``integers`` below ``high``, ``distinct`` integers in
    each row of the last dim."""
    mean: float = 0.0
    spread: float = 1.0
    """Standard deviation of the normal underneath."""
    low: float = 0.0
    high: float | str = 1.0
    """A dim's name where integers index into it."""


@dataclass(frozen=True, kw_only=True)
class TensorSignature:
    """One input or output."""

    name: str
    shape: tuple[Size, ...]
    dtype: str = ACTIVATION
    differentiable: bool = True
    values: Values = dataclasses.field(default_factory=Values)
    """Of an input."""

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype not in INTEGERS

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for given dims."""
        return tuple(size_of(size, dims) for size in self.shape)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How an operator is called."""

    dims: dict[str, Dim]
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]

    def bind(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The dims of a call, from the shapes of its inputs.

        Raises:
            ValueError: a shape does not fit.
        """
        found: dict[str, int] = {}
        for entry in self.inputs:
            if len(shapes[entry.name]) != len(entry.shape):
                raise ValueError(f"{entry.name} has shape {list(shapes[entry.name])}, not {list(entry.shape)}")
            for size, actual in zip(entry.shape, shapes[entry.name], strict=True):
                factor, name = _term(size)
                if not name:
                    if actual != factor:
                        raise ValueError(f"{entry.name} has a size {actual} where {factor} is meant")
                elif actual % factor or found.setdefault(name, actual // factor) != actual // factor:
                    raise ValueError(f"{entry.name} has a size {actual} that does not fit {size}")
        return found

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Signature:
        """Read and check.

        Raises:
            ValueError: anything is not what it must be.
        """
        try:
            data = json.loads(text)
            signature = cls(
                dims={
                    name: Dim(**{**entry, "choices": tuple(entry.get("choices", ()))})
                    for name, entry in data["dims"].items()
                },
                inputs=tuple(_tensor(entry) for entry in data["inputs"]),
                outputs=tuple(_tensor(entry) for entry in data["outputs"]),
            )
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"not a signature: {problem!r}") from problem
        signature.check()
        return signature

    def check(self) -> None:
        """Raise ValueError for names, shapes or ranges that make no sense."""
        if not self.inputs or not self.outputs:
            raise ValueError("a signature needs inputs and outputs")
        names = [t.name for t in (*self.inputs, *self.outputs)]
        if len(set(names)) != len(names) or not all(_NAME.match(n) for n in (*names, *self.dims)):
            raise ValueError("names of tensors and dims must be distinct identifiers")
        used = {name for t in self.inputs for size in t.shape if (name := _term(size)[1])}
        for tensor in (*self.inputs, *self.outputs):
            unknown = [size for size in tensor.shape if (name := _term(size)[1]) and name not in self.dims]
            if unknown or tensor.dtype not in DTYPES or tensor.values.kind not in KINDS:
                raise ValueError(f"{tensor.name}: unknown dim, dtype or distribution ({unknown or tensor.dtype})")
            if isinstance(tensor.values.high, str) and tensor.values.high not in self.dims:
                raise ValueError(f"{tensor.name}: unknown dim {tensor.values.high}")
        if set(self.dims) != used:
            raise ValueError(f"every dim must be a size of some input; {sorted(set(self.dims) - used)} is not")
        for name, dim in self.dims.items():
            if dim.least < 0 or dim.full < 1 or any(c < 0 for c in dim.choices):
                raise ValueError(f"dim {name} has impossible sizes")


def _tensor(entry: dict[str, Any]) -> TensorSignature:
    values = Values(**entry.get("values", {}))
    return TensorSignature(**{**entry, "shape": tuple(entry["shape"]), "values": values})


def _term(size: Size) -> tuple[int, str]:
    """(factor, dim's name); an empty name for a plain number."""
    if isinstance(size, int):
        return size, ""
    found = _TERM.match(size)
    if found is None:
        raise ValueError(f"a size is a number, a dim or K*dim, not {size!r}")
    return int(found[1] or 1), found[2]


def size_of(size: Size, dims: Mapping[str, int]) -> int:
    """A size for given dims."""
    factor, name = _term(size)
    return factor * dims[name] if name else factor


@dataclass(frozen=True, kw_only=True)
class NovelSpec(OperatorSpec):
    """An operator that is known by its reference only."""

    family: ClassVar[str] = NOVEL
    name: str
    """A few words, e.g. ``gated slot attention``."""
    source: str
    """Python source of the reference; untrusted."""
    signature: str
    """:class:`Signature` as JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.source) > LONGEST_SOURCE:
            raise ValueError(f"a reference of more than {LONGEST_SOURCE} characters")
        Signature.from_json(self.signature)

    @property
    def call(self) -> Signature:
        """The signature."""
        return Signature.from_json(self.signature)

    def inputs(self) -> tuple[TensorRole, ...]:
        """The signature's inputs; none is optional."""
        return tuple(TensorRole(name=t.name, differentiable=t.differentiable and t.is_float) for t in self.call.inputs)

    def outputs(self) -> tuple[TensorRole, ...]:
        """The signature's outputs."""
        return tuple(TensorRole(name=t.name, differentiable=t.differentiable and t.is_float) for t in self.call.outputs)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """Unknown without running the reference; nothing is claimed."""
        return 0.0

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """One call at the published sizes: every input read and every output written once, twice that backward."""
        full = {name: dim.full for name, dim in self.call.dims.items()}
        width = {ACTIVATION: DTYPE_BYTES[self.dtype], "float32": 4, "int32": 4, "int64": 8, "bool": 1}
        moved = sum(math.prod(t.sizes(full)) * width[t.dtype] for t in (*self.call.inputs, *self.call.outputs))
        return float(moved * (2 if backward else 1))

    def words(self) -> str:
        """E.g. ``novel: gated slot attention, bfloat16``."""
        return f"novel: {self.name[:60]}, {self.dtype}"
