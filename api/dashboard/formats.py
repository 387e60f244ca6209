"""Numbers as people read them. Shared by pages and terminal."""

from __future__ import annotations

import math
from datetime import datetime

STATE_WORDS = {
    "waiting": "waiting",
    "approval": "waits for approval",
    "queued": "queued",
    "ready": "queued",
    "running": "running",
    "succeeded": "ok",
    "skipped": "skipped",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""States of jobs, stages and steps as they are shown."""

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(value: float | None, unit: str = "") -> str:
    """``49.1 B``: three digits and a short-scale letter."""
    if value is None or not math.isfinite(value):
        return "n/a"
    for scale, letter in UNITS:
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g} {letter}{unit}" if abs(value) < 1e18 else f"{value:.3g} {unit}".rstrip()
    return f"{value:.3g}{' ' + unit if unit else ''}"


def flops(value: float | None) -> str:
    """``3.1 TFLOP``."""
    return count(value, "FLOP").replace(" BFLOP", " GFLOP")


def size(value: float | None) -> str:
    """``1.5 MiB``: binary units."""
    if value is None:
        return "n/a"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """``0.3 s``, ``1 m 36 s``, ``2 h 05 m``; empty for None."""
    if seconds is None:
        return ""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"


def milliseconds(value: float) -> str:
    """``3.78 s``, ``4.96 ms``, ``68.8 us``: a kernel's time, given in milliseconds."""
    for scale, unit in ((1e3, "s"), (1.0, "ms"), (1e-3, "us")):
        if value >= scale * 0.9995:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e3:.2g} us"


def percent(share: float | None) -> str:
    """A share of one as a percentage with sensible digits."""
    if share is None or not math.isfinite(share):
        return "n/a"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def scientific(value: float | None) -> str:
    """An error: ``4.3e-03``."""
    return "n/a" if value is None else f"{value:.1e}"


def clock(moment: datetime | None) -> str:
    """UTC, to the second."""
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")
