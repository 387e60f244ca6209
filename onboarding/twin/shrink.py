"""Smaller sizes for a model's config, chosen by what each field means. Plain data, free of torch.

Two families of rules. *Free*: every kind of size goes to a comfortable small value (hidden 64, four heads, head dims
of 16 and up, eight experts). *Tied*: heads, head dims and widths are divided by a, b and a x b, so that every product
between them (``heads x head_dim = expand x hidden``) survives. Which one a model accepts is found by trying.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

VOCAB = 320
"""256 bytes, then room for special tokens, in a multiple of 64."""
FIRST_SPECIAL = 256
HIDDEN = 64
HEADS = 4
LINEAR_HEADS = 2
"""Value heads of linear attention: its heads are independent, and each one costs the interpreter time."""
HEAD_DIM = 16
"""Smallest head dim: the K extent of one MMA instruction."""
EXPERTS = 8
GROUPS = 8
"""Groups of experts that a twin keeps: their number is part of the routing kernel, not a size."""
TOP_K = 4
STATE = 16

DEPTH = re.compile(
    r"^(num_hidden_layers|num_layers(_per_stack)?|n_layers?|depth|(num_)?(en|de)coder_layers|num_blocks|n_blocks)$"
)
VOCABULARY = re.compile(r"(^|_)vocab(_size(_base|_per_layer_input)?)?$|^(n_words|unpadded_vocab_size)$")
TOKEN_ID = re.compile(r"(_token_id|_token_index|_token_ids)$")
EXPERT_COUNT = re.compile(r"^(n_routed_experts|num_experts|num_local_experts|moe_num_experts|num_routed_experts)$")
EXPERT_EXTRA = re.compile(r"^(zero_expert_num|num_zero_experts)$")
EXPERTS_TOP_K = re.compile(
    r"^(num_experts_per_tok(en)?|moe_(num_)?(topk|top_k|k)|top_k(_experts)?|num_selected_experts)$"
)
EXPERT_GROUPS = re.compile(r"^(n_group|num_expert_group)$")
STATE_SIZE = re.compile(r"(^|_)(d_state|state_size|state_dim)$")
INDEX_HEADS = re.compile(r"^index(er)?_n_heads$")
MOST_INDEX_HEADS = 8
"""Of few heads, all products with a key are often negative: many scores are zero, and equal ones are chosen at will."""
KV_HEADS = re.compile(r"(kv_heads?|key_value_heads|num_query_groups|multi_query_group_num|^n_kv)$")
HEAD_COUNT = re.compile(r"(^|_)(num|n)_(.*_)?heads?$|^(num_heads|n_heads?|n_query|(en|de)coder_attention_heads)$")
HEAD_SIZE = re.compile(
    r"(head_dim|head_size|d_head|d_kv|head_width|kv_channels|headdim|rotary_dim|rope_dim|rotary_ndims)$"
)
RANK = re.compile(r"(_rank|_rank_dim|lora_dim)$")
WINDOW = re.compile(r"(sliding_window(_size)?|attention_chunk_size|chunk_size|index_topk|local_window|window_size)$")
BLOCK = re.compile(r"^block_size$")
LATENTS = re.compile(r"^latent_query_num$")
"""Places of the sequence that an image takes."""
WIDTH = re.compile(
    r"(^|_)(hidden_size|hidden_size_global|d_model|n_embd|n_inner|d_ssm|lru_width|d_inner|emb_dim|embedding_dim|feed_forward_size|intermediate|intermediate_size|ffn_dim|embed_dim"
    r"|ffn_hidden_size|hidden_dim|feedforward_dim|width|out_hidden_size|expert_size|shared_size|channels_size|hidden"
    r"|intermediate_size_mlp|hidden_size_per_layer_input|latent_size|latent_dim|embedding_size|expand_dim|ff_dim|d_ff|inner|mlp_dim|projection_dim)$"
)
SECTION = re.compile(r"_section$")
PER_FREQUENCY = re.compile(r"^(short|long)_factor$")
SELECTED = re.compile(r"^(vision|visual|vit|image|audio)_(feature_|select_)?layers?$")
"""Which layers of a tower are read: numbers from its start, or negative ones from its end."""
_SIZES = (
    DEPTH, VOCABULARY, EXPERT_COUNT, EXPERT_EXTRA, EXPERTS_TOP_K, EXPERT_GROUPS, STATE_SIZE, KV_HEADS, HEAD_COUNT,
    HEAD_SIZE, RANK, WINDOW, BLOCK, WIDTH,
)  # fmt: skip


def known(name: str) -> bool:
    """Whether a field's name tells what kind of size it holds."""
    return any(pattern.search(name) for pattern in _SIZES)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How to shrink: ``heads`` and ``head_dims`` divide counts and sizes; ``tied`` derives widths from both."""

    tied: bool
    heads: float
    linear_heads: float
    head_dims: float
    widths: float
    window: int
    """Length that replaces windows and chunks, in tokens."""
    experts: float
    tokens: int
    """Sequence length of the twin."""
    least: int = 32
    """Smallest width where widths are free."""
    rotary: tuple[tuple[int, int], ...] = ()
    """(frequencies of the published model, frequencies of the twin): half of a head, or of its rotating part."""


def rules_for(text: dict[str, Any], sequence_length: int) -> list[Rule]:
    """The rules worth trying on a (text) config, most comfortable first.

    Args:
        text: resolved fields of the language model's config.
        sequence_length: tokens of the twin's sequences; windows become a quarter of it, so that they cut.
    """
    heads = [v for k, v in _ints(text) if HEAD_COUNT.search(k) and not KV_HEADS.search(k) and v > 0]
    hidden = next((v for k, v in _ints(text) if k in ("hidden_size", "d_model", "n_embd") and v > 0), HIDDEN)
    main = int(text.get("num_attention_heads") or text.get("n_head") or (heads[0] if heads else 1) or 1)
    dims = [v for k, v in _ints(text) if HEAD_SIZE.search(k) and v > 0] or [max(hidden // main, 1)]
    experts = max([v for k, v in _ints(text) if EXPERT_COUNT.search(k)], default=EXPERTS)
    groups = max([v for k, v in _ints(text) if EXPERT_GROUPS.search(k)], default=1)
    # a group's score is the sum of its two best experts
    fewest = max(EXPERTS, 2 * min(groups, GROUPS))
    linear = max([v for k, v in _ints(text) if k.startswith("linear_") and HEAD_COUNT.search(k)], default=1)
    window = 1 << max((sequence_length // 4).bit_length() - 1, 3)

    share = _rotating_share(text)

    def rule(*, tied: bool, heads: float, head_dims: float, widths: float) -> Rule:
        rotary = tuple((round(v * share / 2), round(_head_size(v, head_dims) * share / 2)) for v in dims)
        return Rule(
            rotary=rotary,
            tied=tied,
            heads=heads,
            linear_heads=heads if tied else max(linear / LINEAR_HEADS, 1.0),
            head_dims=head_dims,
            widths=widths,
            window=window,
            experts=max(experts / fewest, 1.0),
            tokens=sequence_length,
        )

    smallest = max(min(dims) / HEAD_DIM, 1.0)
    rules = [rule(tied=False, heads=max(main / HEADS, 1.0), head_dims=smallest, widths=max(hidden / HIDDEN, 1.0))]
    divisors = {max(main / count, 1.0) for count in (1, 2, 4, 8)}
    for a in sorted(divisors, key=lambda a: abs(hidden / (a * smallest) - HIDDEN)):
        rules.append(rule(tied=True, heads=a, head_dims=smallest, widths=a * smallest))
    # heads of a size that the code fixes fit in no smaller width
    rules.append(replace(rules[0], least=2 * HIDDEN))
    return rules


def shrink(fields: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """The fields at small sizes; depth and per-layer lists stay as they are.

    Args:
        fields: resolved config fields, nested configs included.
        rule: the divisors.
    """
    ids: dict[int, int] = {}
    return {key: _shrunk(key, value, fields, rule, ids) for key, value in fields.items()}


def _ints(fields: dict[str, Any]) -> list[tuple[str, int]]:
    """All whole numbers, those of nested configs behind the config's own."""
    own = [(k, v) for k, v in fields.items() if isinstance(v, int) and not isinstance(v, bool)]
    return own + [pair for value in fields.values() if isinstance(value, dict) for pair in _ints(value)]


def _shrunk(key: str, value: Any, fields: dict[str, Any], rule: Rule, ids: dict[int, int]) -> Any:
    if isinstance(value, dict):
        # ``linear_attn_config: {num_heads: 32}`` speaks of linear attention's heads
        prefix = "linear_" if key.startswith("linear_") else ""
        return {k: _shrunk(prefix + k, v, value, rule, ids) for k, v in value.items()}
    if isinstance(value, list) and value and all(isinstance(v, (int, float)) for v in value):
        return _shrunk_list(key, value, fields, rule, ids)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return _size(key, value, fields, rule, ids)


def _shrunk_list(key: str, values: list[Any], fields: dict[str, Any], rule: Rule, ids: dict[int, int]) -> list[Any]:
    if SECTION.search(key):  # rotary frequencies by modality: keep the proportions
        total = dict(rule.rotary).get(sum(values), round(sum(values) / rule.head_dims))
        return _parts(values, max(len(values), total))
    whole = next((v for k, v in fields.items() if WIDTH.search(k) and v == sum(values)), None)
    if whole is not None and len(values) > 1 and all(isinstance(v, int) for v in values):
        return _parts(values, _width(whole, rule))  # parts of a width
    if len(values) > 1 and math.prod(values) == fields.get("max_position_embeddings"):
        side = round(rule.tokens ** (1 / len(values)))  # a grid of positions
        return [side] * (len(values) - 1) + [rule.tokens // side ** (len(values) - 1)]
    if PER_FREQUENCY.search(key):
        return values[: max(1, round(len(values) / rule.head_dims))]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        return values
    return [_size(key, v, fields, rule, ids) for v in values]


def _parts(values: list[int], total: int) -> list[int]:
    """Whole parts of a total, in the proportions of ``values``, none empty."""
    exact = [v * total / sum(values) for v in values]
    parts = [max(1, int(e)) for e in exact]
    for index in sorted(range(len(values)), key=lambda i: parts[i] - exact[i])[: max(total - sum(parts), 0)]:
        parts[index] += 1
    return parts


def _size(key: str, value: int, fields: dict[str, Any], rule: Rule, ids: dict[int, int]) -> int:
    """The small value of one integer field. Order matters: the most particular names first."""
    if TOKEN_ID.search(key):
        # every special token moves behind the bytes, so that text never meets one
        return value if value < 0 else ids.setdefault(value, FIRST_SPECIAL + len(ids) % (VOCAB - FIRST_SPECIAL))
    if VOCABULARY.search(key):
        return min(value, VOCAB)
    if DEPTH.search(key) or value <= 0:
        return value
    if EXPERT_COUNT.search(key) or EXPERT_EXTRA.search(key):
        return max(2, round(value / rule.experts)) if value > 1 else value
    if EXPERTS_TOP_K.search(key):
        return min(value, TOP_K)
    if EXPERT_GROUPS.search(key):
        return min(value, GROUPS)
    if key == "topk_group":
        groups = next((v for k, v in _ints(fields) if EXPERT_GROUPS.search(k)), value)
        return max(1, round(value * min(groups, GROUPS) / groups))
    if WINDOW.search(key):
        return min(value, rule.window)
    if BLOCK.search(key):
        return min(value, max(rule.window // 4, 1))
    if LATENTS.search(key):
        return min(value, max(rule.tokens // 4, 1))
    if STATE_SIZE.search(key):
        return min(value, STATE)
    if KV_HEADS.search(key):
        return _kv_heads(value, fields, rule)
    if INDEX_HEADS.search(key):
        return min(value, MOST_INDEX_HEADS)
    if HEAD_COUNT.search(key) or key.endswith("n_groups"):
        return max(1, round(value / (rule.linear_heads if key.startswith("linear_") else rule.heads)))
    if HEAD_SIZE.search(key):
        return _head_size(value, rule.head_dims)
    if RANK.search(key):
        return min(value, 2 * STATE if value > 2 * 512 else STATE)
    if WIDTH.search(key) and value >= HEAD_DIM:
        return _width(value, rule)
    return value


def _head_size(value: int, divisor: float) -> int:
    return min(value, max(HEAD_DIM if value >= HEAD_DIM else value, round(value / divisor)))


def _rotating_share(text: dict[str, Any]) -> float:
    """The part of a head that rotates."""
    rope = text.get("rope_parameters")
    found = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    found = found or text.get("partial_rotary_factor")
    return float(found) if isinstance(found, int | float) and 0 < found <= 1 else 1.0


def _kv_heads(value: int, fields: dict[str, Any], rule: Rule) -> int:
    """Multi-head stays multi-head, multi-query stays multi-query, grouped stays grouped where it can."""
    counts = (v for k, v in _ints(fields) if HEAD_COUNT.search(k) and not KV_HEADS.search(k) and v > 0)
    heads = int(fields.get("num_attention_heads") or fields.get("num_heads") or next(counts, value))
    small = max(1, round(heads / rule.heads))
    if value == heads:
        return small
    return 1 if value == 1 else max(1, small // 2)


def _width(value: int, rule: Rule) -> int:
    small = value / rule.widths
    if rule.tied:
        return max(1, round(small))
    return int(min(max(rule.least, round(small / 16) * 16), 4 * HIDDEN))
