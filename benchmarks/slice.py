"""``python -m benchmarks.slice BUNDLE --definition DIR``: a slice of a model with and without a bundle.

The first layers of the published model at full width, random weights, one training step (forward and backward, no
optimizer) on one GPU. Contestants: transformers with grouped_mm experts, SDPA and whatever kernels of others it finds
installed (fla), and the same model with the bundle applied. With ``--lora`` the base is frozen and PEFT's adapters on
the linear projections train. The JSON says what each took, and how far the two losses are apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.run import commit, versions

ROUNDS = 7
GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when both were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slice", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--definition", type=Path, default=Path("examples/kimi-linear"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--skip-peer", action="store_true", help="measure the bundle only")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    model = build(options.definition, options.layers, options.lora)
    ids = torch.randint(0, 1000, (1, options.tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "commit": commit(),
        "versions": versions(),
        "measured": time.strftime("%Y-%m-%d"),
        "what": f"{options.definition.name}, {options.layers} layers, {options.tokens} tokens, "
        + (f"LoRA rank {options.lora}" if options.lora else "every parameter trained")
        + ", forward and backward",
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": {},
    }
    # made here and timed here: no signature of somebody to check
    applied = load_apply(options.bundle)(
        model, bundle=options.bundle, verify=False, allow_unproven=True, tokens=options.tokens
    )
    record["compiled_ahead"] = applied.compiled
    record["swapped"] = {digest[:8]: len(names) for digest, names in applied.swapped.items()}
    record["skipped"] = applied.skipped
    _take(record, "bundle", model, ids, options.out)
    record["fallbacks"] = applied.fallbacks
    record["ran"] = applied.ran()
    applied.remove()
    torch.cuda.empty_cache()
    if not options.skip_peer:
        _take(record, "transformers", model, ids, options.out)
    print(json.dumps(record, indent=1))
    return 0 if all("error" not in row for row in record["rows"].values()) else 1


def build(
    definition: Path, layers: int, rank: int, *, device: torch.device | str = "cuda", **changes: Any
) -> nn.Module:
    """The first ``layers`` layers of the model, random weights in bf16; ``changes`` replace the definition's fields."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**json.loads((definition / "config.json").read_text()), **changes})
    whole = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == whole:  # one entry a layer
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    model.train()
    if rank:
        from peft import LoraConfig, get_peft_model

        names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
        wanted = sorted(n for n in names if n.endswith("_proj"))
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=wanted))
    return model


def load_apply(bundle: Path) -> Callable[..., Any]:
    """``apply`` of the bundle itself."""
    spec = importlib.util.spec_from_file_location("bundle_apply", bundle / "apply.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bundle_apply"] = module
    spec.loader.exec_module(module)
    apply: Callable[..., Any] = module.apply
    return apply


def _take(record: dict[str, Any], name: str, model: nn.Module, ids: torch.Tensor, path: Path) -> None:
    """Measure one contestant; what fails is recorded."""
    try:
        record["rows"][name] = measure(model, ids)
    except Exception as problem:
        record["rows"][name] = {"error": f"{type(problem).__name__}: {problem}"[:500]}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(name, record["rows"][name], file=sys.stderr, flush=True)


def measure(model: nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Loss, seconds of the first step, median milliseconds of a step, tokens/s and memory in GiB."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        return loss.detach()

    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    began = time.perf_counter()
    loss = step().item()
    first = time.perf_counter() - began
    began = time.perf_counter()
    step().item()
    second = time.perf_counter() - began
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    middle = sorted(times)[len(times) // 2]
    return {
        "loss": loss,
        "first_step_s": first,
        "second_step_s": second,
        "step_ms": middle,
        "tokens_per_s": ids.numel() / middle * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "weights_gib": base / GIB,
    }


if __name__ == "__main__":
    sys.exit(main())
