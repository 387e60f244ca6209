"""Pictures carry the data they were given, are well-formed, and need no style, script or outside reference."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from onboarding.architecture import Architecture, BlockKind, Census
from onboarding.pictures.charts import layer_errors, loss_curves, time_shares
from onboarding.pictures.strip import layer_strip
from onboarding.stages.align.result import Curves, LayerError
from onboarding.stages.gaps.result import OperatorRow

SVG = "{http://www.w3.org/2000/svg}"


def block(letter: str, layers: list[int]) -> BlockKind:
    return BlockKind(
        letter=letter,
        mixer=f"mixer <{letter}>",
        feed_forward="dense",
        layers=layers,
        parameters=1,
        active_parameters=1,
        flops=1.0,
        bytes_moved=1.0,
        sequence_dependent=False,
        sparse_memory_access=False,
    )


def architecture(strip: str) -> Architecture:
    census = Census(total=1, active=1, by_role={}, tied_embeddings=False, fp32_parameters=0)
    blocks = [block(letter, [i for i, x in enumerate(strip) if x == letter]) for letter in dict.fromkeys(strip)]
    return Architecture(
        name="a <b> & c",
        model_type="m",
        class_name="C",
        sequence_length=8,
        hidden_size=8,
        vocab_size=8,
        num_layers=len(strip),
        strip=strip,
        blocks=blocks,
        census=census,
        graph=[],
        uses=[],
    )


@pytest.mark.parametrize("strip", ["K", "KKKM" * 7, "AB" * 47])
def test_strip_has_one_lettered_cell_a_layer(strip: str) -> None:
    root = ElementTree.fromstring(layer_strip(architecture(strip)))
    assert len(root.findall(f".//{SVG}rect")) == len(strip)
    titles = [t.text for t in root.findall(f".//{SVG}title")]
    assert titles[-1] == f"layer {len(strip) - 1}: mixer <{strip[-1]}>, dense"
    assert len({r.get("fill") for r in root.findall(f".//{SVG}rect")}) == len(set(strip))


def test_charts_are_plain_svg() -> None:
    curves = Curves(
        steps=[0, 1, 2], reference=[5.5, 5.0, 4.0], candidate=[5.5, 5.01, 4.02], band=[0.1] * 3, band_basis="x"
    )
    errors = [
        LayerError(
            name=f"layer {i}",
            kind="output" if i % 2 else "gradient",
            layer=i,
            block="K",
            p50=0.1,
            p99=0.2,
            maximum=0.3,
            rms=0.1,
            tolerance=0.2,
            share=0.5,
        )
        for i in range(4)
    ]
    row = OperatorRow(
        digest="d",
        name="<script>alert(1)</script>",
        role="r",
        family="norm",
        calls=1,
        flops=1.0,
        bytes_moved=1.0,
        floor_ms=1.0,
        provider="torch",
        provider_ms=2.0,
        basis="assumed",
        share_flops=0.1,
        share_bytes=0.1,
        share_time=1.0,
        gap=True,
    )
    for picture in (loss_curves(curves), layer_errors(errors), time_shares([row])):
        root = ElementTree.fromstring(picture)
        assert root.tag == f"{SVG}svg"
        for element in root.iter():
            assert element.tag not in {f"{SVG}script", f"{SVG}style", f"{SVG}foreignObject"}
            assert "style" not in element.attrib
            assert not any(name.endswith("href") or name.startswith("on") for name in element.attrib)
    assert "optimizer step" in loss_curves(curves)
