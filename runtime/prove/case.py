"""The rows of the proof."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from runtime.parallel.config import BalanceConfig, ParallelConfig
from runtime.prove.twins import TWINS

Data = Literal["uneven", "empty", "skewed"]
"""``uneven``: every rank has another number of sequences. ``empty``: some rank has only padding in a micro-batch.
``skewed``: every token has the same experts, so most ranks receive no row."""

BALANCE: dict[str, BalanceConfig] = {
    "none": BalanceConfig(),
    "aux": BalanceConfig(aux_loss=0.1),
    "bias": BalanceConfig(method="bias", bias_speed=0.05),
    "quantile": BalanceConfig(method="quantile", quantile_range=2.0),
    "groups": BalanceConfig(groups=4, groups_kept=2),
    "drop": BalanceConfig(capacity_factor=1.0),
    "reroute": BalanceConfig(capacity_factor=1.0, overflow="reroute"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison with one process."""

    twin: str = "qwen3_moe"
    layout: ParallelConfig = field(default_factory=ParallelConfig)
    lora: bool = False
    recompute: bool = False
    data: Data = "uneven"
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"

    @property
    def words(self) -> list[str]:
        """Cells of the table that say what this is."""
        layout = self.layout
        hops = {"off": "", "across_first": " across", "inside_first": " inside"}[layout.hierarchical]
        places = f"ep{layout.ep}" + (f" hsdp{layout.dp_replicate}" if layout.dp_replicate > 1 else "") + hops
        places += f" chunks{layout.dispatch_chunks}" if layout.dispatch_chunks > 1 else ""
        places += f" replicas{layout.replicas}" if layout.replicas else ""
        places += f" {layout.compression}" if layout.compression != "none" else ""
        places += " ordered" if layout.deterministic else ""
        balance = next(name for name, config in BALANCE.items() if config == layout.balance)
        return [
            self.twin,
            self.dtype,
            places,
            "lora" if self.lora else "full",
            "recompute" if self.recompute else "",
            balance,
            self.data,
        ]


def layouts(ranks: int) -> list[ParallelConfig]:
    """Every way this proof spreads a model over ``ranks``."""
    found = [ParallelConfig()]
    if ranks > 1:
        found.append(ParallelConfig(dp_replicate=2))
    for ep in (2, 4, 8):
        if ep > ranks:
            break
        found.append(ParallelConfig(ep=ep))
        found.append(ParallelConfig(ep=ep, dispatch_chunks=3))
        if ranks // ep > 1:
            found.append(ParallelConfig(ep=ep, dp_replicate=2))
        if ep > 2:
            found.append(ParallelConfig(ep=ep, hierarchical="across_first", ranks_per_node=2))
            found.append(ParallelConfig(ep=ep, hierarchical="inside_first", ranks_per_node=2, dispatch_chunks=2))
    return found


def matrix(ranks: int) -> list[Case]:
    """All rows for one world size."""
    rows = [
        Case(twin=twin, layout=layout, lora=lora, recompute=recompute)
        for twin in TWINS
        for layout in layouts(ranks)
        for lora in (False, True)
        for recompute in (False, True)
    ]
    spread = [layout for layout in layouts(ranks) if layout.ep == min(4, ranks)]
    for twin in TWINS:
        for name, balance in BALANCE.items():
            for layout, recompute in ((spread[0], False), (spread[-1], True)):
                if name != "none":
                    rows.append(Case(twin=twin, layout=_with(layout, balance), recompute=recompute))
        for layout in (replace(spread[0], replicas=1), replace(spread[-1], replicas=2)):
            rows.append(Case(twin=twin, layout=layout, data="skewed"))
            rows.append(Case(twin=twin, layout=layout, data="skewed", lora=True, recompute=True))
        rows.append(Case(twin=twin, layout=replace(spread[0], deterministic=True)))
        for data in ("empty", "skewed"):
            for layout in spread:
                rows.append(Case(twin=twin, layout=layout, recompute=True, data=data))
                rows.append(Case(twin=twin, layout=layout, lora=True, data=data))
        rows.append(Case(twin=twin, layout=spread[0], dtype="float32"))
        rows.append(Case(twin=twin, layout=spread[-1], dtype="float32", lora=True, recompute=True))
        # at 8 bits two honest runs route some tokens differently; skewed data leaves no choice. One hop: each further
        # one rounds a token's sum once more, which one process does not
        rows.append(Case(twin=twin, layout=spread[0], dtype="bfloat16", data="skewed"))
        rows.append(Case(twin=twin, layout=spread[0], dtype="bfloat16", data="skewed", lora=True, recompute=True))
    slow = [row for row in rows if row.twin in SLOW]
    return [row for row in rows if row.twin not in SLOW] + slow[::9]


SLOW = ("kimi_linear",)
"""Twins whose linear attention runs token by token on a CPU: every ninth row, last."""


def _with(layout: ParallelConfig, balance: BalanceConfig) -> ParallelConfig:
    return replace(layout, balance=balance)


def quick(ranks: int) -> list[Case]:
    """A few rows that touch every mechanism, for the fast tests."""
    ep = min(4, ranks)
    return [
        Case(layout=ParallelConfig(ep=ep), recompute=True),
        Case(twin="deepseek_v3", layout=ParallelConfig(ep=2, dispatch_chunks=3), lora=True),
        Case(
            twin="gpt_oss",
            layout=ParallelConfig(ep=ep, hierarchical="across_first", ranks_per_node=2),
            data="skewed",
        ),
        Case(
            twin="qwen3_moe",
            layout=ParallelConfig(ep=2, dp_replicate=2, balance=BALANCE["reroute"]),
            recompute=True,
        ),
        Case(twin="deepseek_v3", layout=ParallelConfig(ep=ep, balance=BALANCE["bias"]), data="empty"),
        Case(layout=ParallelConfig(ep=ep, replicas=1, deterministic=True), data="skewed", recompute=True),
    ]
