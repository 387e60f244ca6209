"""What the runtime says no to, with the fix: raised before a device is touched wherever that is possible."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A run, input or file that cannot be used.

    Args:
        kind: stable word for machines, e.g. ``data-empty``.
        title: one line, what is wrong.
        detail: where, and what to do about it.
        extra: further facts, JSON values only.
    """

    def __init__(self, kind: str, title: str, detail: str = "", **extra: Any) -> None:
        super().__init__(f"{title}: {detail}" if detail else title)
        self.kind = kind
        self.title = title
        self.detail = detail
        self.extra = extra

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as the command line prints it."""
        return {"problem": self.kind, "title": self.title, "detail": self.detail, "extra": self.extra}
