"""What is new in one architecture against another, and the published schema of an architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from onboarding.architecture import (
    Architecture,
    BlockKind,
    BlockRoles,
    Census,
    FeedForwardRole,
    MixerRole,
    NormRole,
    OperatorUse,
    ResidualRole,
)
from onboarding.comparison import compare, differences, features, likeness, nearest
from onboarding.pictures.blocks import block_diagram, parts_of
from onboarding.schema import PUBLISHED, schema_text


def block(**roles: Any) -> BlockKind:
    return BlockKind(
        letter="A",
        mixer="GQA",
        feed_forward="dense 128",
        layers=[0, 1],
        parameters=10,
        active_parameters=10,
        flops=1.0,
        bytes_moved=1.0,
        sequence_dependent=False,
        sparse_memory_access=False,
        roles=BlockRoles(**roles) if roles else None,
    )


def model(name: str, *blocks: BlockKind, uses: list[OperatorUse] | None = None, total: int = 100) -> Architecture:
    census = Census(total=total, active=total, by_role={"mixer": total}, tied_embeddings=False, fp32_parameters=0)
    return Architecture(
        name=name, model_type="m", class_name="M", sequence_length=64, hidden_size=8, vocab_size=16, num_layers=2,
        strip="AA", blocks=list(blocks), census=census, graph=[], uses=uses or [],
    )  # fmt: skip


def norm(width: int, **flags: Any) -> OperatorUse:
    from kernel_templates.norm.spec import Spec

    spec = Spec(hidden=width, dtype="bfloat16", **{"eps": 1e-6, **flags})
    return OperatorUse(
        digest=spec.digest(), spec=spec.to_dict(), words=spec.words(), role="norm", bindings=[], calls=1, flops=1.0,
        bytes_moved=1.0,
    )  # fmt: skip


OLD = block(
    mixers=[MixerRole(kind="full", heads="GQA", query_heads=8, head_dim=16)],
    feed_forwards=[FeedForwardRole(kind="dense", gated=True, activation="silu", width=64)],
    residual=ResidualRole(kind="plain"),
    norms=[NormRole(form="RMSNorm", place="pre")],
)
NEW = block(
    mixers=[MixerRole(kind="full", heads="GQA", query_heads=16, head_dim=16, window=64, sinks=True)],
    feed_forwards=[FeedForwardRole(kind="experts", activation="silu", experts=64, top_k=4, score="sigmoid", latent=32)],
    residual=ResidualRole(kind="hyper-connections", streams=4),
    norms=[NormRole(form="RMSNorm", place="pre")],
)


def test_every_difference_is_named_once() -> None:
    found = compare(model("old", OLD), model("new", NEW, total=400))
    state = {d.name: d.state for d in found.features}
    assert len(state) == len(found.features)
    assert state["mixer: full GQA"] == "changed"
    for name in ("window", "attention sinks", "experts", "experts in a latent width", "residual: hyper-connections"):
        assert state[name] == "new", name
    assert state["feed-forward: dense"] == "gone"
    assert state["norm: RMSNorm, pre"] == "same"
    assert {s.name: s.ratio for s in found.sizes}["parameters"] == 4.0
    assert [d.state for d in found.features] == sorted(
        (d.state for d in found.features), key=["new", "changed", "gone", "same"].index
    )


def test_the_same_model_has_nothing_new() -> None:
    found = compare(model("a", NEW, uses=[norm(8)]), model("b", NEW, uses=[norm(8)]))
    assert found.news == []
    assert found.likeness == 1.0
    assert all(s.ratio == 1.0 for s in found.sizes)


def test_operators_differ_by_switches_not_by_size() -> None:
    found = compare(model("a", OLD, uses=[norm(8)]), model("b", OLD, uses=[norm(16), norm(8, offset=True)]))
    rows = {d.name: d.state for d in found.operators}
    assert sorted(rows.values()) == ["changed", "new"]
    assert any("offset" in name for name, state in rows.items() if state == "new")


def test_a_switch_that_means_nothing_is_not_named() -> None:
    from kernel_templates.routing.spec import Spec

    def routing(**flags: Any) -> OperatorUse:
        spec = Spec(experts=8, top_k=2, **flags)
        plain = norm(64)
        return plain.model_copy(update={"spec": spec.to_dict(), "digest": spec.digest(), "words": spec.words()})

    grouped = {"groups": 4, "top_groups": 2}
    found = compare(model("a", block()), model("b", block(), uses=[routing(), routing(**grouped)])).operators
    names = {row.name for row in found if row.name.startswith("routing")}
    assert names == {"routing: activation softmax", "routing: activation softmax, group score top2"}


def test_the_nearest_is_the_most_alike() -> None:
    others = [model("far", NEW), model("near", OLD)]
    best = nearest(model("mine", OLD), others)
    assert best is not None
    assert best.name == "near"
    assert nearest(model("mine", OLD), [model("mine", OLD)]) is None


TEXTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("xyz"), max_size=6)


@settings(max_examples=80, deadline=None)
@given(TEXTS, TEXTS)
def test_comparing_is_symmetric(a: dict[str, str], b: dict[str, str]) -> None:
    there, back = ({d.name: d.state for d in differences(*pair)} for pair in ((a, b), (b, a)))
    turned = {"new": "gone", "gone": "new", "changed": "changed", "same": "same"}
    assert back == {name: turned[state] for name, state in there.items()}
    assert likeness(a, b) == likeness(b, a)
    assert 0 <= likeness(a, b) <= 1
    assert likeness(a, a) == 1


def test_blocks_are_drawn_along_the_stream() -> None:
    assert [p.title for p in parts_of(OLD, "#fff")] == ["norm", "mixer", "norm", "feed-forward"]
    assert parts_of(NEW, "#fff")[-1].detail == "hyper-connections, 4 streams"
    assert [p.title for p in parts_of(block(), "#fff")] == ["mixer", "feed-forward"]
    hostile = model('<script>"', OLD.model_copy(update={"mixer": "</svg><script>x"}), NEW)
    svg = block_diagram(hostile)
    assert svg.count("<svg") == 1
    assert "<script" not in svg
    assert "style=" not in svg


def test_features_need_no_roles() -> None:
    assert features(model("plain", block()))["mixer: GQA"] == "GQA"


def test_the_published_schema_is_current() -> None:
    assert PUBLISHED.read_text() == schema_text(), "run: .venv/bin/python -m onboarding.schema"


def test_an_architecture_follows_the_schema() -> None:
    import jsonschema

    schema = json.loads(PUBLISHED.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    data = model("a", OLD, NEW, uses=[norm(8)]).model_dump(mode="json")
    assert list(check.iter_errors(data)) == []
    assert list(check.iter_errors({**data, "surprise": 1}))
    assert list(check.iter_errors({**data, "num_layers": "two"}))


def test_comparing_needs_no_torch() -> None:
    found = "[name for name in ('torch', 'transformers', 'triton') if name in sys.modules]"
    script = f"import sys, onboarding.comparison, onboarding.schema; print({found})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
