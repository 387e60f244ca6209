"""The sparse attention hook: latent attention keeps its projections, its indexer and its mask; the kernel attends.

transformers gives an attention function of another name than ``eager`` and ``sdpa`` the chosen keys themselves (where
the module makes a mask of them, only that mask), and expands the latents to keys and values of every head before. So,
while such a module runs, its own copy of the configuration asks for a function of ours, no mask is made of the choice,
and the latents are left as they are: the key projection is taken over to the queries, the value projection to what
comes out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

NEEDED = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling")
MASK_MAKER = "build_attention_mask_from_topk"
"""The method that turns a choice into a mask, in modules whose indexer looks after visibility itself."""
WIDTH = 64
"""Lists are padded to a multiple of it: rows then begin at aligned addresses."""
_registered = count()

Attend = Callable[..., tuple[Tensor, ...]]


def install(hooks: Any, module: nn.Module, swap: Any) -> Callable[[], None]:
    """Let ``module`` attend by ``swap``'s kernel; returns the undo function."""

    def covered(self: Any, hidden: Tensor, more: dict[str, Any]) -> None:
        projection = self.kv_b_proj
        if type(projection) is not nn.Linear or projection.bias is not None:
            raise hooks.Uncovered(f"a key and value projection of class {type(projection).__name__}")
        hooks._covered(hidden, projection.weight)
        if self.training and getattr(self, "attention_dropout", 0.0):
            raise hooks.Uncovered("dropout")
        if more.get("output_attentions"):
            raise hooks.Uncovered("probabilities are asked for")

    def forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            covered(self, args[0] if args else kwargs["hidden_states"], kwargs)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return original(*args, **kwargs)
        with Served(self, swap.call, swap.spec["scale"], swap.name, getattr(swap.applied, "indexers", None)):
            return original(*args, **kwargs)

    undo: Callable[[], None] = hooks._replace_forward(module, forward)
    return undo


class Served:
    """While entered, the module's attention over chosen keys is ``attend`` (tensors named as in the spec).

    ``training`` (``indexer_training.py``) gets what the module's indexer learns from.
    """

    def __init__(self, module: Any, attend: Attend, scale: float, name: str = "", training: Any = None) -> None:
        self.module, self.attend, self.scale = module, attend, scale
        self.name, self.training = name, training
        self.key = f"onboard-sparse-attention-{next(_registered)}"

    def __enter__(self) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.before = self.module.config
        self.module.config = copy.copy(self.before)
        self.module.config._attn_implementation_internal = self.key
        self.module.expand_kv = _as_they_are
        if hasattr(self.module, MASK_MAKER):
            setattr(self.module, MASK_MAKER, _the_choice)
        ALL_ATTENTION_FUNCTIONS[self.key] = self.attention

    def __exit__(self, *problem: object) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        del ALL_ATTENTION_FUNCTIONS[self.key]
        del self.module.expand_kv
        self.module.__dict__.pop(MASK_MAKER, None)
        self.module.config = self.before

    def attention(
        self,
        module: Any,
        query: Tensor,
        latent: Tensor,
        rotary: Tensor,
        attention_mask: Tensor,
        *,
        scaling: float,
        indices: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query [B, H, T, N + R], latent [B, 1, S, C], rotary [B, 1, S, R] -> [B, T, H, V].

        ``indices`` [B, T, K] with a mask; without, the choice itself is in the mask's place.
        """
        batch, heads, tokens, _ = query.shape
        keys, width = latent.shape[2:]
        weight: Tensor = module.kv_b_proj.weight.view(heads, -1, width)
        plain_width = module.qk_nope_head_dim
        to_key, to_value = weight[:, :plain_width], weight[:, plain_width:]
        turning = query.transpose(1, 2)
        plain, turned = turning[..., :plain_width], turning[..., plain_width:]
        if scaling != self.scale:  # the kernel's factor is that of the published size
            plain, turned = plain * (scaling / self.scale), turned * (scaling / self.scale)
        more = {} if others.get("s_aux") is None else {"sink": others["s_aux"]}
        if module.qk_rope_head_dim:
            more |= {"q_rope": turned.flatten(0, 1), "k_rope": rotary.transpose(1, 2).flatten(0, 1)}
        index = flat(attention_mask, keys) if indices is None else chosen(indices, attention_mask, keys)
        tensors = {
            "q": torch.einsum("bthn,hnc->bthc", plain, to_key).flatten(0, 1),
            "k": latent.transpose(1, 2).flatten(0, 1),
            "index": index.flatten(0, 1),
            **more,
        }
        o, *others_found = self.attend(**tensors)
        if self.training is not None:
            target = others_found[0] if others_found else None
            o = self.training.attached(self.name, module.indexer, o, tensors, self.scale, target)
        return torch.einsum("bthc,hvc->bthv", o.view(batch, tokens, heads, width), to_value), None


def _as_they_are(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of ``expand_kv``."""
    return latent, rotary


def _the_choice(*, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """In the place of ``build_attention_mask_from_topk``."""
    return topk_indices


def flat(indices: Tensor, keys: int) -> Tensor:
    """Rows of the flattened keys [B, T, K'] int32 of a choice [B, T, K]; -1 where there is none, and from K on."""
    sequence = torch.arange(indices.shape[0], device=indices.device, dtype=torch.int32)[:, None, None]
    rows = torch.where((indices >= 0) & (indices < keys), indices.int() + sequence * keys, -1)
    return torch.nn.functional.pad(rows, (0, -indices.shape[-1] % WIDTH), value=-1)


def chosen(indices: Tensor, mask: Tensor, keys: int) -> Tensor:
    """Rows of the flattened keys [B, T, K] int32; -1 where the mask [B, 1, T, S] hides the choice, as in early rows."""
    visible = mask[:, 0, :, :keys].expand(indices.shape[0], -1, -1).gather(-1, indices.clamp(min=0).long())
    if visible.dtype != torch.bool:
        visible = visible > torch.finfo(visible.dtype).min / 2
    sequence = torch.arange(indices.shape[0], device=indices.device, dtype=torch.int32)[:, None, None]
    return torch.where(visible & (indices >= 0), indices.int() + sequence * keys, -1)


def mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    """Why the kernel cannot attend for this module, or None."""
    missing = [n for n in NEEDED if not isinstance(getattr(module, n, None), (int, float))]
    if missing or not callable(getattr(module, "expand_kv", None)):
        return f"no {', '.join(missing) or 'expand_kv'}"
    if not isinstance(getattr(module, "kv_b_proj", None), nn.Module) or not hasattr(module, "indexer"):
        return "no projection from latents to keys and values, or no indexer"
    if spec["separate"] or spec["rope"] != bool(getattr(module, NEEDED[1])) or spec["scale"] is None:
        return "the kernel is not of latent attention"
    if spec["sink"] != isinstance(getattr(module, "sinks", None), Tensor):
        return "no sinks" if spec["sink"] else "sinks where the kernel has none"
    return None
