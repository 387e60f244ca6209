"""Candidates whose "kernels" are plain torch: fast stand-ins with the interface of generated modules.

Their formulas are written here on purpose, apart from the families' references; ``fault`` plants a mistake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernel_templates.registry import load_spec
from onboarding.stages.package.layout import KernelEntry, write_kernels

COMMON = """
import math
from concurrent.futures import ThreadPoolExecutor

import torch

FAMILY = {family!r}
SPEC = {spec!r}
INPUTS = {inputs!r}
OUTPUTS = {outputs!r}

{compute}

def bucket(tensors):
    return {{}}


def outputs_like(tensors, config):
    return compute(tensors), {{}}


def forward(tensors, config):
    with torch.no_grad():
        return compute(tensors), {{}}


def backward(tensors, saved, grads, needs, config):
    # a custom op runs below autograd; another thread does not
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(gradients, tensors, grads, list(needs)).result()


def gradients(tensors, grads, needs):
    with torch.enable_grad():
        leaves = {{n: None if t is None else t.detach().clone() for n, t in tensors.items()}}
        for n in needs:
            leaves[n].requires_grad_()
        outputs = compute(leaves)
        used = [n for n in OUTPUTS if grads[n] is not None and outputs[n].requires_grad]
        found = torch.autograd.grad(
            [outputs[n] for n in used], [leaves[n] for n in needs], [grads[n] for n in used], allow_unused=True
        )
    return dict(zip(needs, found))
"""

COMPUTE = {
    "norm": """
def compute(t):
    x = t["x"].float()
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + {eps})
    if {weighted}:
        y = y * (t["weight"].float() + {offset})
    gate = t.get("gate")
    if gate is not None:
        gate = gate.float()
        y = y * (torch.sigmoid(gate) if {gate!r} == "sigmoid" else torch.nn.functional.silu(gate))
    return {{"y": y.to(t["x"].dtype)}}
""",
    "gated_activation": """
def compute(t):
    return {{"y": torch.nn.functional.silu(t["gate"]) * t["up"]}}
""",
    "moe": """
def compute(t):
    x, index, scores, w1, w2 = (t[n] for n in ("x", "index", "scores", "gate_up", "down"))
    y = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        token, slot = torch.where(index == e)
        gate, up = (x[token] @ w1[e].T).chunk(2, -1)
        h = (torch.nn.functional.silu(gate) * up) @ w2[e].T
        y = y.index_add(0, token, h * scores[token, slot, None].to(h.dtype))
    return {{"y": y}}
""",
    "short_convolution": """
def compute(t):
    x, weight, bias = t["x"], t["weight"], t.get("bias")
    window = torch.nn.functional.pad(x, (0, 0, weight.shape[1] - 1, 0))
    y = sum(window[:, w : w + x.shape[1]] * weight[:, w] for w in range(weight.shape[1]))
    y = y if bias is None else y + bias
    return {{"y": torch.nn.functional.silu(y) if {activation!r} == "silu" else y}}
""",
    "linear_attention": """
def compute(t):
    q, k, v, g, beta = (t[n].float() for n in ("q", "k", "v", "g", "beta"))
    if {qk_l2norm}:
        q, k = (z * torch.rsqrt((z * z).sum(-1, keepdim=True) + 1e-6) for z in (q, k))
    state = t.get("initial_state")
    if state is None:
        state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    decay = g if g.ndim == 4 else g[..., None]
    decay = decay * {decay_share}
    rows = []
    for i in range(q.shape[1]):
        state = state * decay[:, i].exp()[..., None]
        new = (v[:, i] - (state * k[:, i, ..., None]).sum(-2)) * beta[:, i, ..., None]
        state = state + k[:, i, ..., None] * new[..., None, :]
        rows.append((state * q[:, i, ..., None]).sum(-2) / math.sqrt(q.shape[3]))
    return {{"o": torch.stack(rows, 1).to(t["v"].dtype), "final_state": state}}
""",
}


def source(spec: dict[str, Any], **fault: Any) -> str:
    """A candidate module for ``spec``; ``fault`` overrides constants (``eps``, ``decay_share``)."""
    loaded = load_spec(spec)

    def role(r: Any) -> str:
        return " ".join(["differentiable"] * r.differentiable + ["optional"] * r.optional)

    constants = {"decay_share": 1.0, "activation": "silu", **spec, "offset": float(spec.get("offset", 0.0)), **fault}
    return COMMON.format(
        family=spec["family"],
        spec=spec,
        inputs={r.name: role(r) for r in loaded.inputs()},
        outputs={r.name: role(r) for r in loaded.outputs()},
        compute=COMPUTE[spec["family"]].format(**constants),
    )


def entry(spec: dict[str, Any], bindings: list[dict[str, Any]], **fault: Any) -> KernelEntry:
    """A kernel as the package stage would write it, judged on the interpreter."""
    return KernelEntry(
        digest=load_spec(spec).digest(),
        spec=load_spec(spec).to_dict(),
        words=load_spec(spec).words(),
        source=source(load_spec(spec).to_dict(), **fault),
        bindings=[{"attributes": {}, "module_paths": [], "function": None, **b} for b in bindings],
        verified=[{"level": "interpreted", "device": "cpu", "triton": "3.6.0", "torch": "2.11.0"}],
        tuned={"device": "interpreter", "rows": [{"bucket": "{}", "config": {}}]},
    )


def write_bundle(folder: Path, entries: list[KernelEntry]) -> Path:
    """An unsigned bundle folder."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {"format": 1, "name": "test", "model_type": "any", "kernels": write_kernels(folder, entries)}
    (folder / "bundle.json").write_text(json.dumps(index))
    return folder
