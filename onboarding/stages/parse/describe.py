"""Words and letters for the kinds of blocks: which mixer, which feed-forward."""

from __future__ import annotations

from collections import Counter

from torch import nn

from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.roles import SHARED, LayerRoles, ModelRoles

_LETTERS = (
    ("KDA", "K"),
    ("gated delta rule", "G"),
    ("sparse MLA", "D"),
    ("MLA", "M"),
    ("sliding", "S"),
    ("Mamba", "B"),
    ("GQA", "A"),
    ("MHA", "A"),
    ("MQA", "A"),
    ("none", "F"),
)


def mixer_words(module: nn.Module, called: list[LeafCall], kernels: list[str]) -> str:
    """A mixer in words, from what it called: ``KDA``, ``gated delta rule``, ``sliding GQA (128)`` ..."""
    words = list(dict.fromkeys([*(_leaf_words(module, leaf) for leaf in called), *map(_kernel_words, kernels)]))
    if words:
        return " + ".join(words)
    if any(isinstance(m, nn.Conv1d) for m in module.modules()):
        return "short convolution"
    return type(module).__name__


def _leaf_words(module: nn.Module, leaf: LeafCall) -> str:
    facts = leaf.facts
    if leaf.kind == "linear_attention":
        return "KDA" if facts["decay"] == "channel" else "gated delta rule"
    if leaf.kind in ("scan", "state_space"):
        return _kernel_words(leaf.name)
    heads, keys = facts["query_heads"], facts["key_heads"]
    if any(hasattr(child, "kv_lora_rank") for child in module.modules()):
        base = "MLA"
    else:
        base = "MHA" if keys == heads else "MQA" if keys == 1 else "GQA"
    if facts["top_k"]:
        return f"sparse {base} (top {facts['top_k']})"
    if facts["window"]:
        return f"sliding {base} ({facts['window']})"
    return base


def _kernel_words(kernel: str) -> str:
    """The mixer that a library function computes, by the libraries' own names."""
    if kernel.startswith(("mamba_chunk", "mamba_split")):
        return "Mamba-2"
    return "Mamba" if kernel in ("selective_scan_fn", "mamba_inner_fn") else kernel


def letters_for(mixers: list[str]) -> dict[str, str]:
    """A letter for each mixer, the customary one where it is free."""
    chosen: dict[str, str] = {}
    for words in mixers:
        if words in chosen:
            continue
        wanted = "H" if " + " in words else next((letter for start, letter in _LETTERS if words.startswith(start)), "X")
        free = [wanted, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        chosen[words] = next((letter for letter in free if letter not in chosen.values()), wanted)
    return chosen


def feed_forward_width(module: nn.Module) -> int | None:
    """The inner width of a feed-forward: what its projection back reads.

    That is the one of another shape where gate and up have the same, in whatever order they are listed; else the last.
    """
    shapes: list[tuple[int, int]] = []
    for child in module.modules():
        if isinstance(child, nn.Linear):
            shapes.append((child.in_features, child.out_features))
        elif type(child).__name__ == "Conv1D":  # GPT-2's linear layer, its weight the other way round
            rows, columns = child.get_parameter("weight").shape
            shapes.append((int(rows), int(columns)))
    if len(shapes) < 2:
        return None
    single = [shape for shape, count in Counter(shapes).items() if count == 1]
    return single[0][0] if len(single) == 1 else shapes[-1][0]


def feed_forward_words(layer: nn.Module, roles: LayerRoles) -> str:
    """A feed-forward in words: ``dense 9216`` or ``MoE 256 experts, top 8, 1 shared``."""
    parts = []
    if roles.experts:
        module = layer.get_submodule(roles.experts[0])
        facts = roles.experts_call.facts if roles.experts_call else {}
        count = facts.get("experts") or (
            len(module) if isinstance(module, nn.ModuleList) else next(p.shape[0] for p in module.parameters())
        )
        text = f"MoE {count} experts" + (f", top {facts['top_k']}" if facts else "")
        shared = [layer.get_submodule(p) for p, role in roles.roles.items() if role == SHARED and p]
        width = max((w for m in shared if (w := feed_forward_width(m))), default=0)
        inner = min((p.shape[i] for p in module.parameters() if p.dim() == 3 for i in (1, 2)), default=0)
        if width:
            text += f", {max(1, round(width / inner)) if inner else 1} shared"
        parts.append(text)
    widths = [w for name in roles.feed_forwards if (w := feed_forward_width(layer.get_submodule(name)))]
    if widths:
        parts.append("dense " + " + ".join(map(str, dict.fromkeys(widths))))
    return " + ".join(parts) or "none"


def kind_mixers(roles: ModelRoles) -> dict[int, str]:
    """First layer of each kind -> its mixer in words."""
    words: dict[int, str] = {}
    for first, known in roles.by_kind.items():
        layer = roles.structure.layers[first]
        found = [
            mixer_words(layer.get_submodule(name), called, known.kernels.get(name, []))
            for name, called in known.mixers.items()
        ]
        words[first] = " + ".join(dict.fromkeys(found)) or "none"
    return words
