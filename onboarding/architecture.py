"""What the parser learns about a model: blocks, census, operators, and where each operator is used.

Plain data, free of torch: the API shows it, later stages read it. Sizes are element counts unless a name says bytes;
FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Hook = Literal[
    "norm",
    "gated_norm",
    "gated_mlp",
    "experts",
    "linear_attention",
    "state_space",
    "short_convolution",
    "hyper_connection",
    "linear_cross_entropy",
    "rotary",
    "routing",
    "sparse_attention",
    "indexer",
    "novel",
]


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


class Attention(Record):
    """How a softmax attention is run by the class: what decides which library kernel can serve it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    implementation: str
    """What transformers chooses for the class: ``sdpa``, or ``eager`` where the class supports nothing else."""
    causal: bool
    mask: bool
    """A mask tensor is passed: what hides keys is more than causality."""
    window: int | None = None
    top_k: int | None = None
    softcap: float | None = None
    sinks: bool = False
    operators: int = 0
    """Of one eager call in this phase: plain torch operators."""
    flops: float = 0.0
    """Of one eager call in this phase."""
    bytes_moved: float = 0.0
    """Of one eager call in this phase."""


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
    attention: Attention | None = None
    """For softmax attention behind an interface."""


Component = Literal[
    "mixer", "feed-forward", "router", "residual", "norm", "positions", "embedding", "head", "loss", "parameters"
]


class Proof(Record):
    """One claim about the model, and how it was checked on the reduced twin."""

    part: Component
    claim: str
    """What is said of the published model: ``sliding window 4096``, ``router: sigmoid, top 8, renormalised`` ..."""
    check: str
    """How: ``module against its definition, outputs and gradients``, ``outputs that move with one input`` ..."""
    error: float | None = None
    """Largest relative error found; for exact checks the number of differences."""
    proven: bool
    reason: str = ""
    """Why it is not proven."""
    layers: list[int] = Field(default_factory=list)
    """Layers of the published model that the claim is about; none: the whole model."""


class MixerRole(Record):
    """What moves information along the sequence. Sizes are the published ones; 0 or None: it has none."""

    kind: str
    """``full``, ``sliding``, ``chunked``, ``sparse``, ``compressed``, ``bidirectional``; ``linear``, ``mamba1``,
    ``mamba2``, ``recurrence``; ``convolution``; ``novel``."""
    heads: str = ""
    """``MHA``, ``GQA``, ``MQA`` or ``MLA``."""
    query_heads: int = 0
    key_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    scale: float | None = None
    latent: int | None = None
    """Width of MLA's key-value latent."""
    query_latent: int | None = None
    window: int | None = None
    chunk: int | None = None
    top_k: int | None = None
    """Keys that sparse attention keeps for a query (pools count with their tokens)."""
    pool: int | None = None
    """Tokens in one selected or compressed entry."""
    indexer: str = ""
    """How keys are scored: ``relu, weighted heads`` ..."""
    sinks: bool = False
    softcap: float | None = None
    output_gate: str = ""
    """Activation of the gate on the output; empty: no gate."""
    qk_norm: bool = False
    bias: str = ""
    """Additive scores: ``alibi``, ``relative`` or ``data``."""
    decay: str = ""
    """Of a recurrence: ``head``, ``channel``, ``state``, ``fixed``, ``none``."""
    delta: bool = False
    convolution: int | None = None
    """Width of the convolution along the sequence."""
    positions: str = ""
    """``rope``, ``partial rope``, ``multimodal rope``, ``learned``, ``alibi``, ``none``."""
    rotary_dims: int = 0
    position_scale: bool = False
    """Queries are scaled by their position."""

    def words(self) -> str:
        """E.g. ``sliding GQA 64/8 x 64, window 128, sinks, rope``."""
        states = {"linear": "linear attention", "mamba1": "Mamba", "mamba2": "Mamba-2", "recurrence": "recurrence"}
        sizes = f"{self.query_heads}/{self.key_heads} x {self.head_dim}" if self.query_heads else ""
        parts = [" ".join(filter(None, [states.get(self.kind, self.kind), self.heads, sizes]))]
        numbers = {"window": self.window, "chunk": self.chunk, "top": self.top_k, "pools of": self.pool}
        parts += [f"{word} {n}" for word, n in numbers.items() if n]
        parts += [f"latent {self.latent}"] if self.latent else []
        parts += ["delta rule"] if self.delta else []
        parts += [f"decay per {self.decay}" if self.decay not in ("fixed", "none") else f"{self.decay} decay"] * bool(
            self.decay
        )
        parts += [f"convolution {self.convolution}"] if self.convolution else []
        parts += [f"indexer: {self.indexer}"] if self.indexer else []
        parts += ["qk-norm"] if self.qk_norm else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += [f"{self.output_gate} output gate"] if self.output_gate else []
        parts += [f"{self.bias} bias"] if self.bias else []
        positions = f"{self.positions} {self.rotary_dims}" if self.positions == "partial rope" else self.positions
        parts += ["no positions" if positions == "none" else positions] if positions else []
        return ", ".join(parts)


class FeedForwardRole(Record):
    """What works on each position alone."""

    kind: str
    """``dense``, ``experts`` or ``novel``."""
    gated: bool = False
    activation: str = ""
    limit: float | None = None
    """Clamp of gate and up."""
    alpha: float = 1.0
    up_offset: float = 0.0
    layout: str = ""
    """``separate``, ``concatenated`` or ``interleaved`` gate and up."""
    bias: bool = False
    width: int = 0
    experts: int = 0
    top_k: int = 0
    router: str = ""
    """E.g. ``sigmoid, selection bias, 8 groups of which 4, top 8, renormalised, x 2.5``."""
    score: str = ""
    selection_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    renormalised: bool = False
    scaling: float = 1.0
    shared: int = 0
    """Feed-forwards beside the routed experts that every token uses."""
    shared_gate: str = ""
    latent: int | None = None
    """Width in which routed experts work, where it is not the model's."""

    def words(self) -> str:
        """E.g. ``128 experts of 2880, silu, interleaved, clamp 7; softmax, top 4, renormalised``."""
        what = f"{self.experts} experts" if self.kind == "experts" else self.kind
        parts = [what + (f" of {self.width}" if self.width else "")]
        parts += [("gated " if self.gated else "") + self.activation] if self.activation else []
        parts += [self.layout] if self.layout in ("interleaved", "concatenated") else []
        parts += [f"clamp {self.limit:g}"] if self.limit else []
        parts += ["biases"] if self.bias else []
        parts += [f"{self.shared} shared"] if self.shared else []
        parts += [f"latent {self.latent}"] if self.latent else []
        return ", ".join(parts) + (f"; {self.router}" if self.router else "")


class NormRole(Record):
    """A normalisation and where it stands."""

    form: str
    """``RMSNorm``, ``RMSNorm (1 + w)``, ``LayerNorm``, ``L2 norm`` ..."""
    place: str
    """``pre``, ``post``, ``query/key``, ``latent``, ``output``, ``final``, ``inner``."""
    weighted: bool = True
    eps: float = 0.0


class ResidualRole(Record):
    """How a part's output joins the stream."""

    kind: str
    """``plain``, ``scaled``, ``parallel``, ``hyper-connections``, ``attention residuals``, ``none`` or ``novel``."""
    scale: float = 1.0
    streams: int = 1


class BlockRoles(Record):
    """What a block is made of, as proven on the reduced twin."""

    mixers: list[MixerRole] = Field(default_factory=list)
    feed_forwards: list[FeedForwardRole] = Field(default_factory=list)
    residual: ResidualRole | None = None
    norms: list[NormRole] = Field(default_factory=list)

    def lines(self) -> list[tuple[str, str]]:
        """What it is made of, part by part: (part, words)."""
        found = [("mixer", mixer.words()) for mixer in self.mixers]
        found += [("feed-forward", forward.words()) for forward in self.feed_forwards]
        if self.residual is not None:
            streams = f", {self.residual.streams} streams" if self.residual.streams > 1 else ""
            factor = f", x {self.residual.scale:g}" if self.residual.scale != 1.0 else ""
            found.append(("residual", self.residual.kind + streams + factor))
        norms = dict.fromkeys(f"{norm.place} {norm.form}" for norm in self.norms)
        return [*found, ("norms", "; ".join(norms))] if norms else found


class NovelReference(Record):
    """A module that matches nothing known: its own subgraph is its definition."""

    module: str
    """Class name."""
    path: str
    """In the reduced twin."""
    code: str
    """The subgraph as Python: ``forward(self, *inputs)``, inputs as listed."""
    inputs: list[str] = Field(default_factory=list)
    """Name and shape of each input."""
    error: float
    """Of the subgraph against the module on fresh inputs, forward and backward."""


class ModelFacts(Record):
    """What holds for the model as a whole."""

    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    positions: str = ""
    """The rotary variant and its scaling, e.g. ``rope, theta 1e+06, yarn x 4``."""
    auxiliary_losses: list[str] = Field(default_factory=list)
    """What is added to the loss, and whether it is on by default."""
    prediction_heads: int = 0
    """Multi-token prediction layers that the class builds."""
    without_gradient: list[str] = Field(default_factory=list)
    """Parameters that get no gradient in the reference (name patterns, ``*`` for the layer)."""
    fp32_parameters: list[str] = Field(default_factory=list)
    buffers: list[str] = Field(default_factory=list)
    """Tensors that are saved with the weights and are not trained."""


class Growth(Record):
    """How a cost grows with the tokens T of a sequence: ``constant + linear T + quadratic T^2``."""

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def at(self, tokens: int) -> float:
        """The cost of a sequence of this length."""
        return self.constant + self.linear * tokens + self.quadratic * tokens * tokens


class MemoryEstimate(Record):
    """Bytes that training at the published size needs, before anything is sharded; activations of one sequence."""

    weights: int
    gradients: int
    optimizer: int
    """AdamW: two float32 moments, and a float32 copy of narrower weights."""
    activations: Growth
    """Everything that the backward reads."""
    recomputed: Growth
    """The same when every block keeps only its input and is run again."""

    def total(self, tokens: int, *, recompute: bool = True) -> float:
        """All of it for one sequence."""
        activations = self.recomputed if recompute else self.activations
        return self.weights + self.gradients + self.optimizer + activations.at(tokens)


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
    growth: Growth | None = None
    """Forward FLOPs of one block at any length; None where only one length was traced."""
    roles: BlockRoles | None = None
    """Read off the reduced twin; None where there is none."""


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
    memory: MemoryEstimate | None = None
    growth: Growth | None = None
    """FLOPs of one training step (forward and backward) of the whole model at any sequence length."""
    without_gradient: list[str] = Field(default_factory=list)
    """Parameters that run but that the class's own loss does not reach (indexers, frozen parts), one layer a kind."""
    novel: list[str] = Field(default_factory=list)
    """Module classes that match no known role and run as their own torch code."""
    facts: ModelFacts | None = None
    proofs: list[Proof] = Field(default_factory=list)
    """Every claim about roles, with its check on the reduced twin."""
    novel_references: list[NovelReference] = Field(default_factory=list)
