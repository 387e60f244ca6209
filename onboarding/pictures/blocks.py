"""The block diagram: one column a kind of block, its parts from bottom to top along the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from onboarding.architecture import Architecture, BlockKind
from onboarding.pictures.strip import colours

COLUMN, GAP, BOX, SPACE = 300, 40, 46, 26
TOP, MARGIN = 58, 20
WRAP = 40
INK, LINE = "#111", "#808080"


@dataclass(frozen=True)
class Part:
    """One box of a block."""

    title: str
    detail: str
    color: str


def block_diagram(architecture: Architecture, *, columns: int = 4) -> str:
    """All kinds of blocks side by side as an SVG document.

    Args:
        architecture: the parsed model.
        columns: blocks in a row; more go to the next one.
    """
    fill = colours(architecture)
    drawn = [(block, parts_of(block, fill[block.letter])) for block in architecture.blocks]
    columns = max(1, min(columns, len(drawn)))
    height = TOP + max((len(parts) for _, parts in drawn), default=1) * (BOX + SPACE) + 40
    rows = -(-len(drawn) // columns)
    width = MARGIN * 2 + columns * COLUMN + (columns - 1) * GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {max(1, rows) * height}" role="img" '
        f'font-family="sans-serif" aria-label="{escape(architecture.name)}: {len(drawn)} kinds of blocks">'
    ]
    for index, (block, parts) in enumerate(drawn):
        x = MARGIN + (index % columns) * (COLUMN + GAP)
        out += _column(block, parts, x, (index // columns) * height, height)
    return "".join([*out, "</svg>"])


def parts_of(block: BlockKind, color: str) -> list[Part]:
    """The boxes of a block in the order of the forward pass."""
    mixer = Part("mixer", block.mixer, color)
    feed_forward = Part("feed-forward", block.feed_forward, "#dddddd")
    roles = block.roles
    if roles is None:
        return [part for part in (mixer, feed_forward) if part.detail != "none"]
    norm = {n.place: n.form for n in roles.norms}
    before = [Part("norm", norm["pre"], "#f4f4f4")] if "pre" in norm else []
    after = [Part("norm", norm["post"], "#f4f4f4")] if "post" in norm else []
    boxes: list[Part] = []
    for part in (mixer, feed_forward):
        if part.detail != "none":
            boxes += [*before, part, *after]
    if roles.residual is not None and roles.residual.kind not in ("plain", "none"):
        streams = f", {roles.residual.streams} streams" if roles.residual.streams > 1 else ""
        boxes.append(Part("residual path", roles.residual.kind + streams, "#fff3c4"))
    return boxes


def _column(block: BlockKind, parts: list[Part], x: int, y: int, height: int) -> list[str]:
    """One block: its stream is the line that all boxes sit on."""
    center = x + COLUMN // 2
    bottom = y + height - 22
    title = f"{block.letter}   {len(block.layers)} of the layers"
    out = [
        f"<g><title>{escape(f'{block.mixer}, {block.feed_forward}')}</title>",
        f'<text x="{center}" y="{y + 24}" font-size="16" font-weight="bold" text-anchor="middle" '
        f'fill="currentColor">{escape(title)}</text>',
        f'<line x1="{center}" y1="{y + 40}" x2="{center}" y2="{bottom}" stroke="{LINE}" stroke-width="2"/>',
        f'<path d="M{center - 5} {y + 48} L{center} {y + 38} L{center + 5} {y + 48} Z" fill="{LINE}"/>',
    ]
    for index, part in enumerate(parts):
        top = bottom - 14 - (index + 1) * (BOX + SPACE) + SPACE
        out.append(
            f'<rect x="{x}" y="{top}" width="{COLUMN}" height="{BOX}" rx="6" fill="{part.color}" stroke="{LINE}"/>'
            f'<text x="{center}" y="{top + 18}" font-size="12" text-anchor="middle" fill="{INK}">'
            f"{escape(part.title)}</text>"
            f'<text x="{center}" y="{top + 36}" font-size="14" text-anchor="middle" fill="{INK}">'
            f"{escape(_short(part.detail))}</text>"
        )
    return [*out, "</g>"]


def _short(text: str) -> str:
    return text if len(text) <= WRAP else text[: WRAP - 1] + "…"
