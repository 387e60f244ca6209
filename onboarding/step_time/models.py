"""Work of published models whose training speed others have measured, from their published sizes. Free of torch.

Checked against the FLOPs a token that the same pages print (``tests/step_time``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onboarding.step_time.work import Work


@dataclass(frozen=True)
class _Part:
    """Of one layer."""

    weights: float = 0.0
    outputs: float = 0.0
    """Numbers that its products write for one token."""

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.weights + other.weights, self.outputs + other.outputs)


def _mlp(hidden: int, width: int, matrices: int = 3) -> _Part:
    """A feed-forward; the activation writes its width once more."""
    return _Part(float(matrices * hidden * width), float(matrices * width + hidden))


@dataclass(kw_only=True)
class _Sum:
    """Weights and mixing added up layer by layer."""

    hidden: int
    vocabulary: int
    layers: int = 0
    always: _Part = _Part()
    """What every token meets."""
    routed: float = 0.0
    active: float = 0.0
    """Routed weights that one token meets."""
    moe_layers: int = 0
    slope: float = 0.0
    constant: float = 0.0
    scanned: float = 0.0
    largest: float = 0.0
    written: float = 0.0
    """By routed experts, for one token."""
    head: int = 128
    experts: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))
    """Number, top k, inner width, width they work in."""

    def attention(self, heads: int, kv: int, head: int, *, window: int = 0) -> _Part:
        """A grouped-query attention layer."""
        self.head = head
        if window:
            self.constant += 4 * window * heads * head
        else:
            self.slope += 4 * heads * head
        weights = 2.0 * self.hidden * heads * head + 2.0 * self.hidden * kv * head
        return _Part(weights, 2.0 * heads * head + 2.0 * kv * head + self.hidden)

    def latent_attention(self, heads: int, q_rank: int) -> _Part:
        """MLA with DeepSeek's dims: 128 + 64 for scores, 128 for values, a latent of 512."""
        self.slope += 2 * heads * (192 + 128)
        self.head = 192
        h = self.hidden
        query = h * q_rank + q_rank * heads * 192
        weights = float(query + h * (512 + 64) + 512 * heads * 256 + heads * 128 * h)
        # queries and keys are put together from their parts once more
        return _Part(weights, float(q_rank + 2 * heads * 192 + 576 + heads * (256 + 192 + 128) + h))

    def mamba2(self, heads: int, head: int, state: int, groups: int) -> _Part:
        """A Mamba-2 mixer."""
        inner = heads * head
        self.scanned += 4 * inner * state
        entering = 2 * inner + 2 * groups * state + heads
        # the convolution, the scan and the gated norm write their width once more each
        return _Part(float(self.hidden * (entering + inner)), float(entering + 4 * inner + self.hidden))

    def layer(self, mixer: _Part, feed_forward: _Part | None = None) -> None:
        """One layer without routed experts."""
        self.layers += 1
        whole = mixer + feed_forward if feed_forward is not None else mixer
        self.always = self.always + whole
        self.largest = max(self.largest, whole.weights)

    def moe(
        self,
        mixer: _Part,
        *,
        experts: int,
        top: int,
        width: int,
        shared: _Part | None = None,
        latent: int = 0,
        matrices: int = 3,
    ) -> None:
        """One layer with routed experts; ``shared`` are a feed-forward for every token."""
        inside = latent or self.hidden
        router = _Part(float(experts * self.hidden), float(experts))
        lowered = _Part(2.0 * self.hidden * latent, float(latent + self.hidden)) if latent else _Part()
        self.layer(mixer + router + lowered, shared)
        self.routed += matrices * inside * width * experts
        self.written += top * (matrices * width + 2 * inside)
        self.active += matrices * inside * width * top
        self.moe_layers += 1
        self.experts = (experts, top, width, inside)

    def work(self, name: str, *, tied: bool = False) -> Work:
        """All of it."""
        head = float(self.hidden * self.vocabulary)
        number, top, width, inside = self.experts
        return Work(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            parameters=self.always.weights + self.routed + head * (1 if tied else 2),
            routed_parameters=self.routed,
            linear_flops=2 * (self.always.weights + head),
            attention_slope=self.slope,
            attention_flops=self.constant,
            scan_flops=self.scanned,
            expert_flops=2 * self.active,
            outputs=self.always.outputs + 2.0 * self.hidden * self.layers,
            routed_outputs=self.written,
            head_dim=self.head,
            moe_layers=self.moe_layers,
            experts=number,
            top_k=top,
            expert_width=width,
            expert_width_in=inside,
            block_dense=self.largest,
            block_routed=self.routed / self.moe_layers if self.moe_layers else 0.0,
        )


def _dense(
    name: str, *, layers: int, hidden: int, width: int, heads: int, kv: int, vocabulary: int, matrices: int = 3
) -> Work:
    total = _Sum(hidden=hidden, vocabulary=vocabulary)
    for _ in range(layers):
        total.layer(total.attention(heads, kv, hidden // heads), _mlp(hidden, width, matrices))
    return total.work(name)


def _qwen3_moe(name: str, *, layers: int, hidden: int, heads: int, width: int) -> Work:
    total = _Sum(hidden=hidden, vocabulary=151936)
    for _ in range(layers):
        total.moe(total.attention(heads, 4, 128), experts=128, top=8, width=width)
    return total.work(name)


def _deepseek(name: str, *, heads: int, experts: int, dense: int, vocabulary: int, predicting: bool = False) -> Work:
    total = _Sum(hidden=7168, vocabulary=vocabulary)
    for index in range(61 + predicting):
        mixer = total.latent_attention(heads, 1536)
        if index < dense:
            total.layer(mixer, _mlp(7168, 18432))
        else:
            # the prediction layer joins two vectors first, and has the head's product once more
            extra = _Part(7168.0 * (2 * 7168 + vocabulary), 7168.0) if index == 61 else _Part()
            total.moe(mixer + extra, experts=experts, top=8, width=2048, shared=_mlp(7168, 2048))
    return total.work(name)


def _gpt_oss(name: str, *, layers: int, experts: int) -> Work:
    total = _Sum(hidden=2880, vocabulary=201088)
    for index in range(layers):
        mixer = total.attention(64, 8, 64, window=0 if index % 2 else 128)
        total.moe(mixer, experts=experts, top=4, width=2880)
    return total.work(name)


def _nemotron_nano() -> Work:
    total = _Sum(hidden=2688, vocabulary=131072)
    for _ in range(6):
        total.layer(total.attention(32, 2, 128))
    for _ in range(23):
        total.layer(total.mamba2(64, 64, 128, 8))
        total.moe(_Part(), experts=128, top=6, width=1856, shared=_mlp(2688, 3712, 2), matrices=2)
    return total.work("nemotron-3-nano")


def _nemotron_super() -> Work:
    total = _Sum(hidden=4096, vocabulary=131072)
    for _ in range(8):
        total.layer(total.attention(32, 2, 128))
    for _ in range(40):
        total.layer(total.mamba2(128, 64, 128, 8))
        total.moe(_Part(), experts=512, top=22, width=2688, shared=_mlp(4096, 5376, 2), latent=1024, matrices=2)
    return total.work("nemotron-3-super")


WORKS = {
    work.name: work
    for work in (
        _dense("llama3-8b", layers=32, hidden=4096, width=14336, heads=32, kv=8, vocabulary=128256),
        _dense("llama3-70b", layers=80, hidden=8192, width=28672, heads=64, kv=8, vocabulary=128256),
        _dense("llama3-405b", layers=126, hidden=16384, width=53248, heads=128, kv=8, vocabulary=128256),
        _dense("qwen2.5-7b", layers=28, hidden=3584, width=18944, heads=28, kv=4, vocabulary=152064),
        _dense("qwen2.5-32b", layers=64, hidden=5120, width=27648, heads=40, kv=8, vocabulary=152064),
        _dense("nemotron-4-340b", layers=96, hidden=18432, width=73728, heads=96, kv=8, vocabulary=256000, matrices=2),
        _qwen3_moe("qwen3-30b-a3b", layers=48, hidden=2048, heads=32, width=768),
        _qwen3_moe("qwen3-235b-a22b", layers=94, hidden=4096, heads=64, width=1536),
        _deepseek("deepseek-v3", heads=128, experts=256, dense=3, vocabulary=129280),
        _deepseek("deepseek-v3-mtp", heads=128, experts=256, dense=3, vocabulary=129280, predicting=True),
        _deepseek("kimi-k2", heads=64, experts=384, dense=1, vocabulary=163840),
        _gpt_oss("gpt-oss-120b", layers=36, experts=128),
        _gpt_oss("gpt-oss-20b", layers=24, experts=32),
        _nemotron_nano(),
        _nemotron_super(),
    )
}
