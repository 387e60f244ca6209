"""Repairing a configuration that its own class leaves broken, by constraints that hold for any model of the kind.

Only fields that the definition does not state are ever filled in: a stated value that does not work is the user's to
correct, and the error names it. Every repair is noted in the architecture's warnings. Three sources, in this order:

1. the class itself: what its error message or validator demands, its default rope base;
2. constraints between fields: head size = width / heads, as many key-value heads as heads, heads that divide a width;
3. the class that it was derived from (transformers' ``modular_*.py`` says which), whose default the field has there.

``assume=True`` adds a fourth: round sizes for counts that nothing determines. It is meant for looking at a class
without any published configuration; sizes are then those of no real model.
"""

from __future__ import annotations

import ast
import copy
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from onboarding.problem import Problem
from onboarding.stages.parse.blame import blame
from onboarding.stages.parse.faults import MISSING, Fault, each_config, faults_of, is_config, names_in, path_to

MOST_REPAIRS = 24
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One field filled in."""

    path: tuple[str, ...]
    value: Any
    why: str

    @property
    def words(self) -> str:
        """The line that a user reads."""
        shown = repr(self.value)
        return f"{'.'.join(self.path)} taken as {shown if len(shown) < 60 else shown[:57] + '...'}: {self.why}"


@dataclass(kw_only=True)
class Attempt:
    """What one attempt had built when it failed: the configuration object is where a repair looks."""

    config: Any = None


def with_repairs(
    config: dict[str, Any], attempt: Callable[[dict[str, Any], Attempt], T], *, assume: bool = False
) -> tuple[T, dict[str, Any], list[Repair]]:
    """Run an attempt on a configuration, repairing unset fields until it works.

    Args:
        config: content of ``config.json``; not changed.
        attempt: may raise :class:`Problem` with the exception as its cause, or any exception.
        assume: allow round sizes where nothing determines them.

    Returns:
        The attempt's result, the repaired configuration, and the repairs.

    Raises:
        Problem: the first that no repair removes, with ``field`` naming the field at fault where one was found.
    """
    repaired, repairs = copy.deepcopy(config), list[Repair]()
    while True:
        state = Attempt()
        try:
            return attempt(repaired, state), repaired, repairs
        except Exception as error:
            cause = _deepest(error)
            found = _propose(repaired, state.config if state.config is not None else _root_in(error), cause, assume)
            if found is None or len(repairs) >= MOST_REPAIRS or any(found.path == r.path for r in repairs):
                blame(error, cause, state.config, config)
                raise _reported(error, repairs) from cause
            repairs.append(found)
            repaired = _set(repaired, found.path, found.value)


def _deepest(error: BaseException) -> BaseException:
    seen = {id(error)}  # an error raised from itself would go round for ever
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _reported(error: Exception, repairs: list[Repair]) -> Exception:
    if isinstance(error, Problem) and repairs:
        error.extra["repairs"] = [repair.words for repair in repairs]
    return error


# ---- where ------------------------------------------------------------------------------------------------------


def _stated(config: dict[str, Any], path: tuple[str, ...]) -> bool:
    value: Any = config
    for name in path:
        if not isinstance(value, dict) or value.get(name) is None:
            return False
        value = value[name]
    return True


def _set(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = dict(config)
    head, rest = path[0], path[1:]
    inner = changed.get(head)
    changed[head] = _set(inner if isinstance(inner, dict) else {}, rest, value) if rest else value
    return changed


# ---- what -------------------------------------------------------------------------------------------------------


def _propose(config: dict[str, Any], root: Any, error: BaseException, assume: bool) -> Repair | None:
    if root is None:
        return None
    faults = [*faults_of(error), *_listed_as_missing(root, error)]
    faults += _named_unset(root, error)
    proposals = [*_demanded(root, error, faults), *_rope(root, error, faults), *_divisible(root, error)]
    proposals += _joined_widths(root, error)
    for fault in faults:
        path = path_to(root, fault.config)
        found = _filled(fault, (*path, fault.name), assume) if path is not None else None
        if found is not None:
            proposals.append(found)
    return next((p for p in proposals if not _stated(config, p.path)), None)


_MUST_BE = re.compile(r"`?(\w+)`? must be (?:set to )?(-?\d+|True|False)\b")
_MAKE_SURE = re.compile(r"`(\w+)=(True|False|\d+)`")


def _demanded(root: Any, error: BaseException, faults: list[Fault]) -> list[Repair]:
    """What the class's own message says: ``x must be 0``, ``make sure that `is_decoder=True```."""
    found = []
    for name, value in [*_MUST_BE.findall(str(error)), *_MAKE_SURE.findall(str(error))]:
        owners = [
            (owner, path) for owner, path in each_config(root) if _read(owner, name) is not None or name in vars(owner)
        ]
        owners.sort(key=lambda pair: not any(f.config is pair[0] and f.name == name for f in faults))
        for _, path in owners[:1]:
            found.append(Repair(path=(*path, name), value=ast.literal_eval(value), why="its class demands it"))
    return found


def _listed_as_missing(root: Any, error: BaseException) -> list[Fault]:
    """Fields that a validator lists: ``missing required fields: ['a', 'b']``."""
    match = re.search(r"missing required fields?: \[([^\]]*)\]", str(error))
    names = re.findall(r"\w+", match[1]) if match else []
    return [
        Fault(config=owner, name=name, value=None, where="its validator")
        for name in names
        for owner in ([c for c, _ in each_config(root)] + [_raiser(error)])
        if _has(owner, name)
    ]


def _named_unset(root: Any, error: BaseException) -> list[Fault]:
    """A field that the message names and no decoder's configuration sets; checks outside model code raise like that."""
    if not isinstance(error, ValueError | AttributeError):
        return []
    owners = [owner for owner, path in each_config(root) if not path_is_tower(path)]
    owners.sort(key=lambda owner: owner is not root.get_text_config())
    return [
        Fault(config=owner, name=name, value=None, where="the message")
        for name in names_in(error)
        for owner in owners
        if _has(owner, name) and _read(owner, name) is None
    ]


def _raiser(error: BaseException) -> Any:
    """The object whose method raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_locals.get("self") if trace is not None else None


def _root_in(error: BaseException) -> Any:
    """The outermost configuration among the locals of an exception that came before one was built."""
    seen: list[Any] = []
    link: BaseException | None = error
    while link is not None:
        trace = link.__traceback__
        while trace is not None:
            held = trace.tb_frame.f_locals
            seen += [value for value in (*held.values(), getattr(held.get("self"), "config", None)) if is_config(value)]
            trace = trace.tb_next
        link = link.__cause__
    wanted = [fault.config for fault in faults_of(_deepest(error))]

    def rank(root: Any) -> tuple[int, int]:
        return sum(path_to(root, c) is not None for c in wanted), sum(path_to(root, c) is not None for c in seen)

    return max(seen, key=rank, default=None)


_DIVISIBLE = re.compile(r"divisible by|multiple of")


def _divisible(root: Any, error: BaseException) -> list[Repair]:
    """Head counts that do not divide the width: the nearest count that does, larger first."""
    told = _DIVISIBLE.search(str(error)) is not None
    if not told and not (isinstance(error, RuntimeError) and re.search(r"size|dimension|shape", str(error))):
        return []
    numbers = {int(n) for n in re.findall(r"\d+", str(error))}
    found = []
    for owner, path in each_config(root):
        heads, width = _read(owner, "num_attention_heads"), _read(owner, "hidden_size")
        free = not told and not path_is_tower(path) and _read(owner, "head_dim") is None
        if isinstance(heads, int) and isinstance(width, int) and width % heads and (free or {heads, width} <= numbers):
            counts = [n for n in range(1, width) if width % n == 0]
            best = min(counts, key=lambda n: (abs(n - heads), -n))
            found.append(
                Repair(path=(*path, "num_attention_heads"), value=best, why=f"{heads} heads do not divide {width}")
            )
    return found


_WIDTHS = (
    re.compile(r"same reduction dim, but got \[\d+, (\d+)\] X \[(\d+), \d+\]"),
    re.compile(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)"),
    re.compile(r"Expected (\d+) in dimension \d+ but got (\d+)"),
)


def _joined_widths(root: Any, error: BaseException) -> list[Repair]:
    """Two parts of a tower that are joined and differ in width: the second is given the width of the first."""
    match = next((m for pattern in _WIDTHS if (m := pattern.search(str(error)))), None)
    if match is None:
        return []
    first, second = int(match[1]), int(match[2])
    return [
        Repair(path=(*path, name), value=first, why=f"what it is joined with is {first} wide")
        for owner, path in each_config(root)
        if path_is_tower(path)
        for name, value in vars(owner).items()
        if value == second and not isinstance(value, bool) and re.search(r"_(size|dim)$", name)
    ]


def path_is_tower(path: tuple[str, ...]) -> bool:
    """Whether a nested configuration is a tower's."""
    return any("vision" in name or "audio" in name for name in path)


def _rope(root: Any, error: BaseException, faults: list[Fault]) -> list[Repair]:
    """Rotary settings: one entry a layer type where the class looks one up; sections that fill the rotary width."""
    found = []
    for owner, path in sorted(each_config(root), key=lambda pair: path_is_tower(pair[1])):
        types = _read(owner, "layer_types")
        if isinstance(error, KeyError) and isinstance(types, list) and error.args and error.args[0] in types:
            theta = float(getattr(owner, "default_theta", 10000.0))
            rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind in dict.fromkeys(types)}
            found.append(
                Repair(path=(*path, "rope_parameters"), value=rope, why="the class looks rope up by layer type")
            )
        settings = _read(owner, "rope_parameters")
        match = re.search(r"sum exactly to (\d+) .*split_sizes=\[([\d, ]+)\]", str(error))
        if match and isinstance(settings, dict):
            wanted, sections = int(match[1]), [int(n) for n in match[2].split(",")]
            head = _int(owner, "head_dim") or _head_dim(owner) or 0
            share = 2 * sum(sections) / head if head else 0
            part = settings.get("partial_rotary_factor") or 1.0
            if not head:  # the width is no multiple of the heads: a head is what its sections fill
                size, why = round(2 * sum(sections) / part), f"its rotary sections {sections} fill it"
                found.append(Repair(path=(*path, "head_dim"), value=size, why=why))
            if head and 0 < share < 1 and wanted != sum(sections) and "partial_rotary_factor" not in settings:
                found.append(
                    Repair(
                        path=(*path, "rope_parameters"),
                        value={
                            **{k: v for k, v in settings.items() if v is not None},
                            "mrope_section": sections,
                            "partial_rotary_factor": share,
                        },
                        why=f"the rotary sections {sections} cover {2 * sum(sections)} of {head}",
                    )
                )
        if (
            isinstance(error, TypeError)
            and isinstance(settings, dict)
            and any(fault.config is owner and fault.name == "rope_parameters" for fault in faults)
        ):
            half = (_int(owner, "head_dim") or _head_dim(owner) or 0) // 2
            if half and half % 4 == 0 and not settings.get("mrope_section"):
                value = {**settings, "mrope_section": [half // 4] * 4}
                why = "equal parts of half a head: the class needs sections and gives none"
                found.append(Repair(path=(*path, "rope_parameters"), value=value, why=why))
    return found


def _read(config: Any, name: str) -> Any:
    """A field; None where it is missing or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _has(config: Any, name: str) -> bool:
    """Whether a field is there and can be read."""
    try:
        return hasattr(config, name)
    except Exception:  # a property that fails
        return False


def _int(config: Any, *names: str) -> int | None:
    return next((v for n in names if isinstance(v := _read(config, n), int) and v > 0), None)


def _head_dim(config: Any) -> int | None:
    width, heads = _int(config, "hidden_size", "d_model"), _int(config, "num_attention_heads", "n_heads")
    return width // heads if width and heads and width % heads == 0 else None


def _dense_then_sparse(config: Any) -> list[str] | None:
    depth = _int(config, "num_hidden_layers")
    return ["dense", *["sparse"] * (depth - 1)] if depth else None


_CONSTRAINTS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    (r"^(head_dim|attention_head_dim|kv_channels)$", _head_dim, "width / heads"),
    (r"^(num_key_value_heads|n_kv_heads)$", lambda c: _int(c, "num_attention_heads"), "as many as heads"),
    (r"^(swa_|sliding_)\w*heads$", lambda c: _int(c, "num_attention_heads"), "as many as heads"),
    (r"^rope_theta$", lambda c: float(getattr(c, "default_theta", 10000.0)), "the class's default base"),
    (r"^decoder_start_token_id$", lambda c: getattr(c, "pad_token_id", None) or 0, "the pad token, as in T5"),
    (r"_token_(id|index)$", lambda c: 0, "any id will do: it is only compared with"),
    (r"^default_language$", lambda c: next(iter(getattr(c, "languages", None) or []), None), "the first language"),
    (r"^vocabulary_map$", lambda c: {"<image>": 0}, "tokens of images are not in the text's vocabulary"),
    (r"^(moe|expert)_intermediate_size$", lambda c: _int(c, "intermediate_size"), "as wide as a dense block"),
    (r"^mlp_layer_types$", _dense_then_sparse, "the pattern that these classes document: dense, then sparse"),
    (r"_layer_map$", lambda c: [], "an optional list, left empty"),
    (r"^index(er)?_head_dim$", lambda c: _int(c, "head_dim"), "it must hold the rotary part of a head"),
    (r"^max_position_embeddings$", lambda c: 2048, "any length will do: it is only a limit"),
)
_ASSUMED: tuple[tuple[str, Any], ...] = (
    (r"^(n_routed_experts|num_experts|num_local_experts|moe_num_experts)$", 64),
    (r"^(n_shared_experts|num_shared_experts)$", 1),
    (r"^(num_experts_per_tok|top_k_experts|moe_topk|moe_top_k)$", 8),
    (r"^(indexer|index)_n_heads$", 16),
    (r"^(indexer|index)_kv_heads$", 1),
    (r"^(indexer_budget|index_topk)$", 2048),
    (r"^indexer_compress_ratio$", 4),
    (r"^sliding_window$", 1024),
    (r"^downsample_rate$", "1/2"),
    (r"^clip_", 8.0),
)


def _filled(fault: Fault, path: tuple[str, ...], assume: bool) -> Repair | None:
    """A value for an unset field."""
    if not fault.unset:
        return None
    for pattern, derive, why in _CONSTRAINTS:
        if re.search(pattern, fault.name) and (value := derive(fault.config)) is not None:
            return Repair(path=path, value=value, why=why)
    for origin, value in _defaults_of_parents(type(fault.config), fault.name):
        fitted = _fit(value, fault.config)
        if fitted is not None:
            return Repair(path=path, value=fitted, why=f"the default of {origin}, which this class is derived from")
    if assume:
        for pattern, value in _ASSUMED:
            if re.search(pattern, fault.name):
                return Repair(path=path, value=value, why="assumed, since the class gives no value")
    return None


def _fit(value: Any, config: Any) -> Any:
    """A parent's per-layer list at this configuration's depth."""
    depth = _int(config, "num_hidden_layers")
    if isinstance(value, list | tuple) and depth and value and all(isinstance(v, str) for v in value):
        return [value[i % len(value)] for i in range(depth)]
    return value


def _defaults_of_parents(cls: type, name: str) -> Iterator[tuple[str, Any]]:
    """The field's default in the configuration classes of the models that a class is derived from."""
    folder = cls.__module__.rpartition(".")[0]
    if not folder.startswith("transformers.models."):
        return
    for parent in parents_of(folder):
        for config_class in _config_classes(parent):
            if config_class is cls:
                continue
            value = _default(config_class, name)
            if value is not None and value is not MISSING:
                yield config_class.__name__, value


@cache
def _default(config_class: type, name: str) -> Any:
    try:
        return getattr(config_class(), name, MISSING)
    except Exception:  # a class with defaults of its own that do not work says nothing
        return MISSING


@cache
def parents_of(folder: str) -> tuple[str, ...]:
    """Model packages that the modular definition of one imports its classes from, nearest first, and theirs."""
    found: dict[str, None] = {}
    queue = [folder]
    while queue:
        here = queue.pop(0)
        package = importlib.import_module(here)
        for file in sorted(Path(next(iter(package.__path__))).glob("modular_*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module and "." in node.module:
                    parent = f"transformers.models.{node.module.split('.')[0]}"
                    if parent not in found and parent != folder and ".auto" not in parent:
                        found[parent] = None
                        queue.append(parent)
    return tuple(found)


def _config_classes(package: str) -> list[type]:
    name = package.rpartition(".")[2]
    try:
        module = importlib.import_module(f"{package}.configuration_{name}")
    except ImportError:
        return []
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "to_dict")
    ]
