"""Inputs that a model's forward accepts, made from the names of its parameters and its configuration's sizes.

Nothing here knows a model: the modalities' arguments have customary names (``pixel_values``, ``image_grid_thw``,
``pixel_attention_mask`` ...) and a few customary layouts, which are tried in turn.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from onboarding.stages.parse.faults import is_config

Inputs = dict[str, Any]
_PIXELS = ("pixel_values", "flattened_patches", "hidden_states", "pixel_values_videos", "img_embeds", "x")
_MERGES = (
    "spatial_merge_size", "merge_size", "downsample_factor", "scale_factor", "merge_kernel_size", "pooling_kernel_size",
)  # fmt: skip
PACKED_WITH_PLACES = "flattened_patches"
"""Packed patches with two numbers before the pixels: their row and column, from 1."""
DEFAULT_IMAGE = 224
MOST_PATCHES = 64
"""Side of the patch grid at most: an image of 896 pixels at patches of 14."""


def vision_part(config: Any) -> Any:
    """The configuration of the vision tower, or None."""
    found = [
        value
        for name, value in vars(config).items()
        if is_config(value) and any(word in name for word in ("vis", "image", "vit", "vq", "encoder"))
    ]
    return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Sizes of one image of a vision tower."""

    channels: int
    patch: int
    temporal: int
    merge: int
    """Side of the square of patches that becomes one token."""
    rows: int
    columns: int

    @property
    def height(self) -> int:
        """Pixels."""
        return self.rows * self.patch

    @property
    def width(self) -> int:
        """Pixels."""
        return self.columns * self.patch

    @property
    def patches(self) -> int:
        """Patches of the image."""
        return self.rows * self.columns

    @property
    def patch_elements(self) -> int:
        """Numbers in one packed patch."""
        return self.channels * self.temporal * self.patch**2


def _number(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[-1]
        if isinstance(value, dict):
            value = value.get("height") or value.get("shortest_edge")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def picture_of(config: Any) -> Picture:
    """The image that a model is configured for (its stated size, else 224 pixels), in whole merged patches."""
    tower = vision_part(config) or config
    patch = _number(tower, "patch_size", "spatial_patch_size") or _number(config, "patch_size") or 14
    size = _number(tower, "image_size", "img_size", "input_size", "resolution") or _number(config, "image_size")
    merge = 1
    for part in (tower, config):
        for name in _MERGES:
            merge = math.lcm(merge, _number(part, name) or 1)
    side = size // patch if size else min(DEFAULT_IMAGE // patch, MOST_PATCHES)
    side = max(min(side, MOST_PATCHES) // merge, 1) * merge
    return Picture(
        channels=_number(tower, "num_channels", "in_channels", "in_chans") or 3,
        patch=patch,
        temporal=_number(tower, "temporal_patch_size") or 1,
        merge=merge,
        rows=side,
        columns=side,
    )


def _pixel_layouts(picture: Picture, names: set[str], name: str, read: set[int]) -> list[tuple[int, ...]]:
    """Shapes that a pixel argument may have, likeliest first.

    Args:
        picture: the image.
        names: of all parameters beside it.
        name: of the argument.
        read: widths that the tower's linear layers read: a packed patch has one of them.
    """
    c, p, h, w, n = picture.channels, picture.patch, picture.height, picture.width, picture.patches
    merged = p * picture.merge
    elements = [e for e in (picture.patch_elements, 2 * picture.patch_elements, c * p * p) if e in read]
    widths = list(dict.fromkeys([*elements, picture.patch_elements]))
    packed = [(n, e) for e in widths]
    batched = [(1, n, e) for e in dict.fromkeys([*elements, c * p * p])]
    image = (1, c, h, w)
    tiles = [(1, t, c, h, w) for t in (1, 2, 3, 4, 5, 7)]
    squares = [(n, c, p, p), (n, merged, merged, c), (n, picture.temporal, p, p, c)]
    if any("grid" in other for other in names):
        return [*packed, *squares, image, *batched, *tiles]
    if names & {"spatial_shapes", "image_position_ids", "pixel_position_ids"}:
        return [*batched, *packed, image]
    if "target_sizes" in names:
        return [(1, c, p, n * p), image, *batched]
    if "aspect_ratio_ids" in names:
        return [(1, 1, 4, c, h, w), *tiles]
    if "image_token_pooling" in names:
        return [*batched, image]
    if names & {"pixel_mask", "pixel_attention_mask"} or "video" in name:
        return [*tiles, image]
    return [image, *tiles, *squares, *packed, *batched]


def image_inputs(parameters: dict[str, Any], config: Any, dtype: torch.dtype, read: set[int]) -> Iterator[Inputs]:
    """Argument sets for one image, likeliest layout first; empty for a function that takes no image.

    Args:
        parameters: of the function, by name.
        config: of the whole model.
        dtype: of the tower.
        read: widths that the tower's linear layers read.
    """
    picture, names = picture_of(config), set(parameters)
    main = next((name for name in _PIXELS if name in names), None) or next((n for n in names if "pixel" in n), None)
    if main is None:
        return
    if main == PACKED_WITH_PLACES:  # two numbers before the pixels say where the patch is
        widths = read & {picture.patch_elements, 2 * picture.patch_elements} or read
        layouts: list[tuple[int, ...]] = [(1, picture.patches, 2 + width) for width in sorted(widths)[:8]]
    else:
        layouts = _pixel_layouts(picture, names, main, read)
    for layout in layouts:
        given: Inputs = {main: torch.zeros(layout, dtype=dtype)}
        if main == PACKED_WITH_PLACES:
            rows, columns = torch.arange(1, picture.rows + 1), torch.arange(1, picture.columns + 1)
            given[main][..., :2] = torch.cartesian_prod(rows, columns).to(dtype)
        for name, parameter in parameters.items():
            needed = parameter.default is inspect.Parameter.empty or _wanted(name)
            if name not in given and needed:
                value = _companion(name, picture, layout, config, dtype)
                if value is not None:
                    given[name] = value
        yield given
        if len(layout) == 5 and "pixel_attention_mask" in given:  # which images are there, not which pixels
            yield {**given, "pixel_attention_mask": torch.ones(layout[:2], dtype=torch.bool)}


def _wanted(name: str) -> bool:
    return name.startswith(("image_", "pixel_", "spatial", "target", "grid", "aspect", "high_res"))


def _companion(name: str, picture: Picture, layout: tuple[int, ...], config: Any, dtype: torch.dtype) -> Any:
    """The value of an argument that goes with an image."""
    rows, columns = picture.rows, picture.columns
    if name in ("image_grid_thw", "grid_thw", "grid_thws"):
        return torch.tensor([[1, rows, columns]])
    if name in ("image_grid_hw", "image_grid_hws", "spatial_shapes", "target_sizes", "grid_hw"):
        return torch.tensor([[rows, columns]])
    if name in ("image_sizes", "original_image_sizes"):
        return torch.tensor([[picture.height, picture.width]])
    if name in ("pixel_mask",) or (name == "pixel_attention_mask" and len(layout) >= 4):
        lead = layout[:-3] if len(layout) == 5 else layout[:1]
        return torch.ones(*lead, *layout[-2:], dtype=torch.int64)
    if name in ("pixel_attention_mask", "patch_attention_mask"):
        return torch.ones(layout[:2], dtype=torch.int64)
    if name in ("image_position_ids", "pixel_position_ids"):
        grid = torch.cartesian_prod(torch.arange(columns), torch.arange(rows))
        return grid[None]
    if name in ("qformer_input_ids", "protein_input_ids"):
        return torch.zeros(1, 8, dtype=torch.int64)
    if name == "aspect_ratio_ids":
        return torch.ones(1, 1, dtype=torch.int64)
    if name == "aspect_ratio_mask":
        return torch.ones(1, 1, 4, dtype=torch.int64)
    if name == "high_res_pixel_values":
        size = _number(getattr(config, "high_res_vision_config", None), "image_size") or 1024
        return torch.zeros(1, picture.channels, size, size, dtype=dtype)
    if name == "image_merge_sizes":
        return torch.ones(1, dtype=torch.int64)
    if name == "image_token_pooling":
        return torch.zeros(1, picture.patches // 4, 4, dtype=torch.int64)
    if name == "image_grids":
        return torch.tensor([[rows // 2, columns // 2, 0, 0]])
    return None


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's named parameters without ``self`` and catch-alls."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {n: p for n, p in inspect.signature(function).parameters.items() if n != "self" and p.kind not in kinds}


def text_inputs(parameters: dict[str, Any], ids: torch.Tensor, config: Any) -> Inputs:
    """A sequence of tokens as input and labels, for the decoder too where a class has its own."""
    given: Inputs = {"labels": ids} if "labels" in parameters else {}
    for name in parameters:
        if name in ("state", "noise", "timestep", "actions"):
            given[name] = _robot(name, config)
        elif name in ("input_ids", "decoder_input_ids", "qformer_input_ids"):
            given[name] = ids if name != "qformer_input_ids" else ids[:, :8]
        elif name == "bbox":
            given[name] = _boxes(ids)
        elif name in ("protein_input_ids",):
            given[name] = ids[:, :64]
        elif name == "mm_token_type_ids":  # all of it text
            given[name] = torch.zeros_like(ids)
    return given


def _boxes(ids: torch.Tensor) -> torch.Tensor:
    """Corners [B, T, 4] in (0, 1) of one box a token, side by side along a diagonal."""
    start = torch.arange(ids.shape[1], dtype=torch.float32) / (ids.shape[1] + 1)
    corners = torch.stack([start, start, start + 1 / (ids.shape[1] + 1), start + 1 / (ids.shape[1] + 1)], dim=-1)
    return corners.expand(ids.shape[0], -1, -1)


def with_image(model: Any, ids: torch.Tensor) -> Iterator[Inputs]:
    """Arguments of a whole class for text and one image, likeliest layout first.

    Args:
        model: the class.
        ids: int64 [B, T].
    """
    parameters = parameters_of(model.forward)
    text = model.config.get_text_config()
    books = getattr(text, "num_codebooks", None)
    if isinstance(books, int) and "input_ids" in parameters:  # one row of tokens a codebook
        yield {"input_ids": ids.repeat_interleave(books, 0), "labels": ids[..., None].repeat(1, 1, books)}
    if "shared_kv_states" in parameters:
        # asked for hidden states, the class computes every position, not only the last
        yield {**_states_of_another_model(model, ids), "use_cache": False, "output_hidden_states": True}
    if text_inputs(parameters, ids, model.config).keys() - {"input_ids", "labels"}:
        yield {**text_inputs(parameters, ids, model.config), "use_cache": False}
    if "patch_lengths" in parameters_of(getattr(model, "model", model).forward):  # else found by values of the data
        size = max(int(getattr(model.config, "patch_size", 4)), 1)
        lengths = ids.new_full((ids.shape[0], -(-ids.shape[1] // size)), size)
        yield {"input_ids": ids, "labels": ids, "use_cache": False, "patch_lengths": lengths}
    read = {m.in_features for m in model.modules() if isinstance(m, torch.nn.Linear)}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for given in image_inputs(parameters, model.config, dtype, read):
        images = next((t.shape[1] for t in given.values() if isinstance(t, torch.Tensor) and t.dim() == 5), 1)
        if "image_attention_mask" in parameters:
            given["image_attention_mask"] = ids.new_ones(*ids.shape, images)
        if "image_embeds_position_mask" in parameters:
            places = _number(model.config, "latent_query_num") or 1
            row = [int(place < places) for place in range(ids.shape[1])]
            given["image_embeds_position_mask"] = torch.tensor([row] * ids.shape[0])
        yield {**given, **text_inputs(parameters, ids, model.config), "use_cache": False}


def repeated(given: Inputs, batch: int) -> Inputs:
    """The same image for every sequence, where an argument holds one."""
    return {
        k: v.repeat(batch, *[1] * (v.dim() - 1)) if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == 1 else v
        for k, v in given.items()
    }


def drawn_values(name: str, value: Any, generator: torch.Generator) -> Any:
    """Random numbers in the place of pixels; where a patch's place is written before them, it stays."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or name == "bbox":
        return value
    drawn = torch.randn(value.shape, generator=generator)
    if name == PACKED_WITH_PLACES:
        drawn[..., :2] = value[..., :2]
    return drawn


def _states_of_another_model(model: Any, ids: torch.Tensor) -> Inputs:
    """For a draft model that reads its target's last keys and values, and embeddings beside hidden states."""
    text = model.config.get_text_config()
    batch, tokens = ids.shape
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    width = max(m.in_features for m in model.children() if isinstance(m, torch.nn.Linear))
    states = {}
    for module in model.modules():
        kind = text.layer_types[module.layer_idx] if isinstance(getattr(module, "layer_idx", None), int) else None
        groups, size = getattr(module, "num_key_value_groups", None), getattr(module, "head_dim", None)
        if kind is not None and groups and size:
            shape = (batch, text.num_attention_heads // groups, tokens, size)
            states[kind] = (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    return {"inputs_embeds": torch.zeros(batch, tokens, width, dtype=dtype), "shared_kv_states": states}


def loss_of(output: Any, ids: torch.Tensor) -> torch.Tensor:
    """A model output's loss, or the cross entropy of its logits, or their sum where they have another length."""
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss.float().mean()
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    if logits.dim() == 3 and logits.shape[:2] == ids.shape:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    return logits.float().sum()


_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length")
_OFFSET = 8
"""A table of learned positions may have a few rows more than positions."""


def _robot(name: str, config: Any) -> torch.Tensor:
    """The state of a robot, or a chunk of its actions: what an action model reads and predicts."""
    state, action = _number(config, "max_state_dim", "state_dim") or 32, _number(config, "max_action_dim", "action_dim")
    chunk = _number(config, "chunk_size", "n_action_steps") or 50
    shapes = {"state": (1, state), "timestep": (1,)}
    return torch.zeros(shapes.get(name, (1, chunk, action or 32)))


def stated_limit(model: Any) -> int | None:
    """The longest sequence that the configuration names."""
    text = model.config.get_text_config()
    return min((v for n in _LIMITS if isinstance(v := getattr(text, n, None), int) and v > 0), default=None)


def sequence_limit(model: Any, tokens: int) -> tuple[int, list[str]]:
    """The longest sequence up to ``tokens`` that a model can read: a table of learned positions ends it.

    Returns:
        The length, and a note where it is shorter than asked for.
    """
    stated = limit = stated_limit(model) or tokens
    tables = [
        tensor
        for module in model.modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if any(limit <= size <= limit + _OFFSET for size in tensor.shape[: tensor.dim() - 1 or 1])
        and (isinstance(module, torch.nn.Embedding) or "pos" in name or "bias" in name or tensor.dim() >= 3)
    ]
    if not tables:
        return tokens, []
    for module in model.modules():  # positions may start behind the padding token, as in RoBERTa
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            rows = module.num_embeddings - module.padding_idx - 1
            if stated - _OFFSET <= rows < stated:
                limit = rows
    if limit >= tokens:
        return tokens, []
    return limit, [f"traced at {limit} tokens: its table of positions ends there"]
