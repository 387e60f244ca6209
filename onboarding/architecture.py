"""What the parser learns about a model: blocks, census, operators, and where each operator is used.

Plain data, free of torch: the API shows it, later stages read it. Sizes are element counts unless a name says bytes;
FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Hook = Literal["norm", "gated_norm", "gated_mlp", "experts", "linear_attention"]


class Record(BaseModel):
    """Base of all stored data: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class Binding(Record):
    """One module class of the model that an operator spec may serve, and how a kernel is put in its place."""

    hook: Hook
    """Which adapter of the bundle's ``apply.py`` calls the kernel."""
    target: str
    """``package.module:ClassName`` of the module whose forward uses the operator."""
    function: str | None = None
    """For function hooks: the name, in the target's Python module, that the forward calls."""
    attributes: dict[str, str] = Field(default_factory=dict)
    """Tensor name of the spec -> attribute of the module that holds it (``{"weight": "weight"}``)."""
    module_paths: list[str] = Field(default_factory=list)
    """Names of the modules in the full model, as ``named_modules()`` gives them."""


class OperatorUse(Record):
    """An operator spec, how often the model runs it, and where."""

    digest: str
    spec: dict[str, Any]
    words: str
    role: str
    """What it does in the model: ``block norm``, ``linear attention``, ``experts`` ..."""
    bindings: list[Binding]
    calls: int
    """Invocations in one forward pass of the whole model."""
    flops: float
    """Forward FLOPs of all its calls at the architecture's ``sequence_length``."""
    bytes_moved: float
    """Forward byte floor of all its calls."""
    eager_operators: int = 0
    """Plain torch operators, forward and backward of all calls, that transformers' own code runs for it."""
    eager_flops: float = 0.0
    eager_bytes: float = 0.0
    """Bytes that those operators move: what serving it without a kernel costs."""


class GraphOperator(Record):
    """One row of the aggregated operator graph: an aten operator or a marked function, with its shapes."""

    name: str
    shapes: str
    role: str
    block: str
    """Letter of the block kind it belongs to; empty outside the blocks."""
    phase: Literal["forward", "backward"]
    count: int
    """Over the whole model: calls per block times blocks."""
    flops: float
    bytes_moved: float
    use: str = ""
    """Digest of the operator spec that this row is a part of; empty where torch serves it."""
    matmul: bool = False
    """Runs on matrix units."""


class BlockKind(Record):
    """A kind of decoder block: same mixer, same feed-forward, same flags."""

    letter: str
    mixer: str
    """Attention kind: ``KDA``, ``gated delta rule``, ``MLA``, ``GQA`` ..."""
    feed_forward: str
    """``dense`` or ``MoE 256 experts, top 8, 1 shared`` ..."""
    layers: list[int]
    parameters: int
    """Of one block."""
    active_parameters: int
    flops: float
    """Forward FLOPs of one block at ``sequence_length``."""
    bytes_moved: float
    sequence_dependent: bool
    """The block carries state along the sequence (linear attention, SSM)."""
    sparse_memory_access: bool
    """The block gathers by data-dependent indices (routed experts, sparse attention)."""


class Census(Record):
    """Parameters of the full model at its published size."""

    total: int
    active: int
    """Used by one token: routed experts count top_k of all."""
    by_role: dict[str, int]
    tied_embeddings: bool
    fp32_parameters: int
    """Parameters that the model keeps in float32 by its own code."""
    not_built: dict[str, int] = Field(default_factory=dict)
    """Parts that the published checkpoint holds and the class does not build (for example MTP layers)."""


class Architecture(Record):
    """A parsed model definition."""

    name: str
    model_type: str
    class_name: str
    sequence_length: int
    """Tokens at which FLOPs and bytes are counted, batch 1."""
    hidden_size: int
    vocab_size: int
    num_layers: int
    strip: str
    """One letter a layer, e.g. ``KKKMKKKM``."""
    blocks: list[BlockKind]
    census: Census
    graph: list[GraphOperator]
    uses: list[OperatorUse]
    modality: str = "text"
    warnings: list[str] = Field(default_factory=list)
    novel: list[str] = Field(default_factory=list)
    """Module classes that match no known role and run as their own torch code."""
