"""Generated modules: the same bits as the template, readable, self-contained, deterministic."""

from __future__ import annotations

import ast
import itertools
import random
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernel_templates
from kernel_templates import configs
from kernel_templates.bind import bind_template
from kernel_templates.gated_activation.spec import ACTIVATIONS, LAYOUTS
from kernel_templates.loading import load_source
from kernel_templates.registry import family_module, spec_class
from kernel_templates.spec import OperatorSpec, TensorRole
from onboarding.stages.generate.folding import SpecialiseError
from onboarding.stages.generate.specialize import formatted, specialise

TEMPLATES = Path(kernel_templates.__file__).parent
GOLDEN = Path(__file__).parent / "golden"
SMALL = {
    "norm": {"hidden": 40},
    "gated_activation": {"width": 24},
    "short_convolution": {"channels": 24},
    "hyper_connection": {"hidden": 24},
    "linear_cross_entropy": {"hidden": 32, "vocabulary": 200},
    "rotary": {"heads": 2, "key_heads": 1, "head_dim": 16, "rotary_dim": 16},
    "routing": {"experts": 16, "top_k": 3},
    "attention_residual": {"hidden": 24},
    "indexer": {"top_k": 4, "heads": 2, "head_dim": 16},
    "sparse_attention": {"heads": 4, "key_dim": 24, "value_dim": 24, "top_k": 9},
    "moe": {"experts": 4, "top_k": 2, "hidden": 32, "intermediate": 16},
    "linear_attention": {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16},
}
NORM = [
    {"weighted": w, "offset": o, "gate": g, "residual": r}
    for w, o, g, r in itertools.product((True, False), (True, False), ("none", "sigmoid", "silu"), (True, False))
    if w or not o
]
GATED = [
    {"activation": a, "layout": layout, "limit": limit}
    for a, layout, limit in itertools.product(ACTIVATIONS, LAYOUTS, (None, 1.5))
] + [{"activation": "silu", "alpha": 1.702, "limit": 1.5, "up_offset": 1.0, "layout": "interleaved"}]
MOE = [
    {"activation": "silu"},
    {"activation": "silu", "limit": 1.5, "alpha": 1.702, "up_offset": 1.0, "bias": True, "transposed": True,
     "gate_up_layout": "interleaved"},
    {"activation": "gelu", "transposed": True},
    {"activation": "relu2", "bias": True},
    {"activation": "gelu_tanh", "gate_up_layout": "interleaved", "limit": 0.5},
]  # fmt: skip
LINEAR = [
    {"decay": d, "delta": delta, "qk_l2norm": norm, "scale": scale}
    for d, delta, norm, scale in [
        ("channel", True, True, None),
        ("head", True, True, None),
        ("none", False, False, 0.5),
        ("channel", False, True, None),
        ("head", False, False, 1.0),
        ("none", True, True, None),
    ]
]
EVERY = [(f, flags) for f, rows in (("norm", NORM), ("gated_activation", GATED), ("moe", MOE)) for flags in rows]
EVERY += [("linear_attention", flags) for flags in LINEAR]
CONVOLUTIONS = [
    {"width": width, "activation": activation, "bias": bias, "states": states}
    for width, activation, bias, states in [
        (4, "silu", False, False),
        (3, "none", True, False),
        (2, "silu", True, True),
    ]
]
LOSSES = [
    {},
    {"frozen": True, "softcap": 3.0, "logit_scale": 0.5},
    {"reduction": "none", "bias": True, "z_loss": 1e-3},
    {"reduction": "statistics", "label_smoothing": 0.1},
    {"reduction": "sum", "bias": True, "softcap": 4.0, "label_smoothing": 0.1, "z_loss": 1e-3},
]
ROTARIES = [
    {},
    {"keys": False, "norm": True},
    {"pairs": "interleaved", "angles": "pair", "regrouped": True},
    {"temporal": 2, "height": 3, "norm": True, "offset": True},
]
ROUTINGS = [
    {"renormalise": True},
    {"activation": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "scale": 2.5},
    {"activation": "sqrt_softplus", "groups": 2, "group_score": "max", "renormalise": True, "sum_eps": 1e-20},
]


def _id(value):
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


def _spec(family, flags, dtype="float32"):
    return spec_class(family)(**SMALL[family], **flags, dtype=dtype)


def _equal(a, b, where):
    assert a.keys() == b.keys(), where
    for name in a:
        if a[name] is None or b[name] is None:
            assert a[name] is b[name], f"{where} {name}"
            continue
        same = (a[name] == b[name]) | (a[name].isnan() & b[name].isnan())
        assert bool(same.all()), f"{where} {name} differs in {int((~same).sum())} of {same.numel()} elements"


def assert_same_bits(spec: OperatorSpec, tmp_path: Path, count: int = 2) -> None:
    """Outputs, saved tensors and gradients of the generated module equal the template's, bit for bit."""
    template = family_module(spec.family, "template")
    cases = family_module(spec.family, "cases")
    generated = load_source(specialise(TEMPLATES / spec.family / "template.py", spec).source, tmp_path)
    bound = bind_template(template, spec)
    for fact in ("FAMILY", "SPEC", "INPUTS", "OUTPUTS", "TRAITS"):
        assert getattr(generated, fact) == getattr(bound, fact)
    tables = configs.load(TEMPLATES / spec.family / "configs")
    seed = int(spec.digest()[:8], 16)
    generator = torch.Generator().manual_seed(seed)
    for case in cases.cases(spec, random.Random(seed), count, "interpreted"):
        dtype = getattr(torch, spec.dtype)
        tensors = cases.make_tensors(spec, case, generator, dtype, "cpu")
        sizes = bound.bucket(tensors)
        assert generated.bucket(tensors) == sizes
        config = configs.choose(tables, "interpreter", sizes).config
        runs = []
        for module in (bound, generated):
            outputs, saved = module.forward(dict(tensors), config)
            torch.manual_seed(seed)
            grads = {n: torch.randn(t.shape).to(t.dtype) for n, t in outputs.items()}
            needs = frozenset(
                n for n, role in bound.INPUTS.items() if "differentiable" in role and tensors.get(n) is not None
            )
            found = module.backward(dict(tensors), saved, grads, needs, config)
            runs.append((outputs, saved, found))
        for what, a, b in zip(("output", "saved", "gradient"), *runs, strict=True):
            _equal(a, b, f"{case.name}: {what}")


def _rows():
    """Every combination; of the expensive ones only the first two in the fast suite, of the gates every other."""
    for i, (family, flags) in enumerate(EVERY):
        earlier = sum(f == family for f, _ in EVERY[:i])
        slow = earlier >= 2 if family in ("moe", "linear_attention") else family == "gated_activation" and earlier % 2
        yield pytest.param(family, flags, marks=pytest.mark.slow if slow else ())
    for flags in CONVOLUTIONS:
        yield pytest.param("short_convolution", flags)
    for flags in ({}, {"sources": 2, "scale": 0.5}):
        yield pytest.param("attention_residual", flags)
    for flags in (
        {},
        {"activation": "none", "weighted": False},
        {"operation": "objective"},
        {"operation": "compression"},
    ):
        yield pytest.param("indexer", flags)
    latent = {"rope": True, "rope_dim": 8, "sink": True, "target": True, "scale": 0.2}
    for flags in ({}, latent, {"kv_heads": 2, "separate": True}, {"deterministic": False}):
        yield pytest.param("sparse_attention", flags)
    for family, rows in (("linear_cross_entropy", LOSSES), ("rotary", ROTARIES), ("routing", ROUTINGS)):
        for i, flags in enumerate(rows):
            yield pytest.param(family, flags, marks=pytest.mark.slow if i > 1 else ())
    for flags in ({"centred": True, "bias": True}, {"centred": True, "gate": "silu", "residual": True}):
        yield pytest.param("norm", flags)
    for flags in ({}, {"rounds": 0, "post_factor": 1.5}, {"rounds": 0, "post": False}):
        yield pytest.param("hyper_connection", flags)


@pytest.mark.parametrize(("family", "flags"), list(_rows()), ids=_id)
def test_same_bits_as_the_template(family, flags, tmp_path):
    assert_same_bits(_spec(family, flags), tmp_path, count=1 if family in ("moe", "linear_attention") else 2)


@st.composite
def _any_norm_or_gate(draw):
    if draw(st.booleans()):
        weighted = draw(st.booleans())
        flags = {
            "weighted": weighted,
            "offset": weighted and draw(st.booleans()),
            "gate": draw(st.sampled_from(("none", "sigmoid", "silu"))),
            "residual": draw(st.booleans()),
            "eps": draw(st.floats(1e-12, 1.0)),
        }
        return _spec("norm", flags, draw(st.sampled_from(("float32", "bfloat16", "float16"))))
    activation = draw(st.sampled_from(ACTIVATIONS))
    flags = {
        "activation": activation,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "limit": draw(st.none() | st.floats(1e-3, 1e3)),
        "alpha": draw(st.floats(0.1, 4.0)) if activation == "silu" else 1.0,
        "up_offset": draw(st.floats(-2.0, 2.0)),
    }
    return _spec("gated_activation", flags, draw(st.sampled_from(("float32", "bfloat16"))))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_any_norm_or_gate())
def test_same_bits_for_any_flags(tmp_path_factory, spec):
    assert_same_bits(spec, tmp_path_factory.mktemp("generated"), count=1)


@pytest.mark.parametrize(("family", "flags"), [EVERY[0], EVERY[17], EVERY[30], *EVERY[-11:-8], *EVERY[-6:-4]], ids=_id)
def test_generated_source_keeps_house(family, flags, tmp_path):
    spec = _spec(family, flags)
    module = specialise(TEMPLATES / family / "template.py", spec)
    source = module.source
    assert source == specialise(TEMPLATES / family / "template.py", spec).source
    assert source == formatted(source)
    tree = ast.parse(source)
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert "spec" not in names
    imports = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert imports <= {"torch", "triton", "triton.language", "math"}
    assert {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} <= {"__future__"}
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert set(functions[-20:]) >= {"bucket", "outputs_like", "forward", "backward"} <= set(functions)
    assert set(module.kernels) <= set(functions)
    path = tmp_path / "generated.py"
    path.write_text(source)
    # nothing unused is left: imports, names, arguments
    done = subprocess.run(
        [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--select", "F", "--output-format", "concise",
         str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_golden():
    """One whole module, as a reader sees it; regenerate deliberately, by hand, when the template changes."""
    spec = spec_class("norm")(hidden=128, gate="sigmoid", eps=1e-5)
    found = specialise(TEMPLATES / "norm" / "template.py", spec).source
    # the template's digest and notes change with every edit of it
    assert found[found.index("import torch") :] == (GOLDEN / "norm_sigmoid.txt").read_text()


# ---- small templates ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Toy(OperatorSpec):
    family = "toy"
    flip: bool = True
    limit: float | None = None
    mode: str = "a"

    def inputs(self):
        return (TensorRole(name="x"),)

    def outputs(self):
        return (TensorRole(name="y"),)

    def words(self):
        return "a toy"


HEAD = """
import torch
import triton
import triton.language as tl
"""
ENTRIES = """
def bucket(tensors, spec):
    return {}

def outputs_like(tensors, spec, config):
    return {"y": torch.empty_like(tensors["x"])}, {}

def backward(tensors, saved, grads, needs, spec, config):
    return {"x": grads["y"]}
"""


def _toy(tmp_path, body, **flags):
    path = tmp_path / "toy" / "template.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(body) + ENTRIES)
    helper = "@triton.jit\ndef twice(x):\n    # doubled by adding\n    return x + x\n"
    (tmp_path / "tl_ops.py").write_text(f"import triton\nimport triton.language as tl\n\n\n{helper}")
    return specialise(path, _Toy(**flags)).source


TWO_SITES = '''
@triton.jit
def _scaled(x, NEGATE: tl.constexpr, FLIP: tl.constexpr):
    """x or -x."""
    if NEGATE:
        x = -x
    if FLIP:
        x = x + 1.0
    return x

@triton.jit
def _kernel(x, y, n, FLIP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    # the same helper twice, with opposite flags
    v = _scaled(v, FLIP, False)
    v = _scaled(v, False, FLIP)
    v = _scaled(v, True, not FLIP)
    tl.store(y + i, v, mask=i < n)

def forward(tensors, spec, config):
    outputs, saved = outputs_like(tensors, spec, config)
    _kernel[(1,)](tensors["x"], outputs["y"], tensors["x"].numel(), FLIP=spec.flip, BLOCK=config["block"])
    return outputs, saved
'''


@pytest.mark.parametrize("flip", [True, False])
def test_a_helper_is_folded_for_each_call_site(tmp_path, flip):
    source = _toy(tmp_path, TWO_SITES, flip=flip)
    module = load_source(source, tmp_path)
    x = torch.tensor([1.0, -2.0, 0.5])
    outputs, _ = module.forward({"x": x}, {"block": 4})
    expected = -(-x + 1) if flip else -x + 1
    assert torch.equal(outputs["y"], expected)
    assert source.count("def _scaled") == 3
    assert "# the same helper twice, with opposite flags" in source


def test_helpers_come_along(tmp_path):
    source = _toy(
        tmp_path,
        """
        from kernel_templates.tl_ops import twice

        @triton.jit
        def _kernel(x, y, other, MODE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
            i = tl.arange(0, BLOCK)
            v = twice(tl.load(x + i))
            if LIMIT is not None:
                v = tl.minimum(v, -LIMIT * 2.0)
            elif MODE == "b":
                v += tl.load(other + i)
            else:
                v = -v  # only in mode a
            tl.store(y + i, v)

        def forward(tensors, spec, config):
            outputs, saved = outputs_like(tensors, spec, config)
            other = torch.zeros_like(tensors["x"]) if spec.mode == "b" else None
            _kernel[(1,)](tensors["x"], outputs["y"], other, MODE=spec.mode, LIMIT=spec.limit, BLOCK=4)
            return outputs, saved
        """,
    )
    module = load_source(source, tmp_path)
    assert torch.equal(module.forward({"x": torch.arange(4.0)}, {})[0]["y"], -2 * torch.arange(4.0))
    assert "# doubled by adding" in source
    assert "# only in mode a" in source
    assert "other" not in source
    assert "kernel_templates" not in source
    negative = _toy(tmp_path, (tmp_path / "toy" / "template.py").read_text().split("def bucket")[0], limit=3.0)
    assert "tl.minimum(v, -6.0)" in negative


def test_a_parameter_that_is_assigned_to_stays(tmp_path):
    source = _toy(
        tmp_path,
        """
        def _shifted(x, by):
            by = by + 1 if x.numel() > 2 else by
            return x + by

        def forward(tensors, spec, config):
            return {"y": _shifted(tensors["x"], spec.flip)}, {}
        """,
    )
    module = load_source(source, tmp_path)
    assert torch.equal(module.forward({"x": torch.zeros(3)}, {})[0]["y"], torch.full((3,), 2.0))
    assert torch.equal(module.forward({"x": torch.zeros(2)}, {})[0]["y"], torch.full((2,), 1.0))


def test_arguments_with_effects_are_not_dropped(tmp_path):
    source = _toy(
        tmp_path,
        """
        def _second(first, second, use):
            return first if use else second

        def forward(tensors, spec, config):
            log = []
            y = _second(log.append(1), tensors["x"] + 0, not spec.flip)
            return {"y": y + len(log)}, {}
        """,
    )
    assert torch.equal(load_source(source, tmp_path).forward({"x": torch.zeros(1)}, {})[0]["y"], torch.ones(1))


def test_truth_is_folded_only_where_it_is_decided(tmp_path):
    source = _toy(
        tmp_path,
        """
        def forward(tensors, spec, config):
            n = tensors["x"].numel()
            both = spec.flip and n > 2
            either = n > 2 or spec.flip
            neither = n > 2 and not spec.flip
            chosen = "yes" if spec.mode in ("a", "c") else "no"
            return {"y": (both, either, neither, chosen)}, {}
        """,
    )
    forward = load_source(source, tmp_path).forward
    assert forward({"x": torch.zeros(3)}, {})[0]["y"] == (True, True, False, "yes")
    assert forward({"x": torch.zeros(2)}, {})[0]["y"] == (False, True, False, "yes")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def forward(tensors, spec, config):\n    return spec.width", "spec.width is not a flag"),
        ("import os\ndef forward(tensors, spec, config):\n    return {}, {}", "may not import os"),
        (
            "def forward(tensors, spec, config):\n    tl.static_assert(spec.mode == 'b')\n    return {}, {}",
            "static_assert fails",
        ),
        ("def other():\n    pass", "no function forward"),
    ],
)
def test_what_cannot_be_specialised_is_refused(tmp_path, body, message):
    with pytest.raises(SpecialiseError, match=message):
        _toy(tmp_path, body)
