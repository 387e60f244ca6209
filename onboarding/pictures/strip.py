"""The layer strip: one cell a layer, coloured by block kind, lettered so that colour is never the only sign."""

from __future__ import annotations

from html import escape

from onboarding.architecture import Architecture

# Okabe and Ito's palette: told apart with any common colour blindness.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")


def colours(architecture: Architecture) -> dict[str, str]:
    """Block letter -> fill colour, in order of first appearance."""
    letters = list(dict.fromkeys(architecture.strip))
    return {letter: PALETTE[i % len(PALETTE)] for i, letter in enumerate(letters)}


def layer_strip(architecture: Architecture, *, width: int = 960) -> str:
    """The strip as an SVG document, wrapped into rows of at most 64 layers.

    Args:
        architecture: the parsed model.
        width: drawing width in user units; the picture scales to its container.
    """
    fill = colours(architecture)
    # Two block kinds may share a letter (a dense and an MoE layer with the same mixer): a layer's own kind names it.
    names = {layer: f"{b.mixer}, {b.feed_forward}" for b in architecture.blocks for layer in b.layers}
    per_row = max(1, min(64, architecture.num_layers))
    cell = width / per_row
    height = 34.0
    rows = (architecture.num_layers + per_row - 1) // per_row
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * (height + 18):.0f}" role="img" '
        f'aria-label="{escape(architecture.name)}: {architecture.num_layers} layers {escape(architecture.strip)}">'
    ]
    for index, letter in enumerate(architecture.strip):
        x, y = (index % per_row) * cell, (index // per_row) * (height + 18)
        title = f"layer {index}: {names.get(index, letter)}"
        parts.append(
            f'<g><title>{escape(title)}</title><rect x="{x + 1:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" '
            f'height="{height}" rx="3" fill="{fill[letter]}"/>'
            f'<text x="{x + cell / 2:.1f}" y="{y + 22:.1f}" font-size="{min(14.0, cell * 0.8):.1f}" '
            f'font-family="sans-serif" text-anchor="middle" fill="#111">{escape(letter)}</text>'
        )
        if index % 8 == 0:
            parts.append(
                f'<text x="{x + 1:.1f}" y="{y + height + 13:.1f}" font-size="10" font-family="sans-serif" '
                f'fill="#777">{index}</text>'
            )
        parts.append("</g>")
    parts.append("</svg>")
    return "".join(parts)
