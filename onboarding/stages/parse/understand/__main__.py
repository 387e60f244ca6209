"""``python -m onboarding.stages.parse.understand [MODEL_TYPE ...] [--all] [--markdown]``: roles proven, architecture by
architecture."""

from __future__ import annotations

import argparse
import sys
import time

from onboarding.architecture import Proof
from onboarding.stages.parse.understand.prove import understand


def main() -> int:
    """Examine the twins of transformers' default configurations and print a table."""
    parser = argparse.ArgumentParser(prog="python -m onboarding.stages.parse.understand")
    parser.add_argument("names", nargs="*", help="model types, or paths of config.json; none: the hybrid and MoE ones")
    parser.add_argument("--claims", action="store_true", help="print every claim")
    options = parser.parse_args()
    names = options.names or hybrid_and_moe()
    print(f"{'architecture':<24} {'claims':>6} {'proven':>6} {'open':>5} {'novel':>5} {'s':>6}")
    complete = 0
    for name in names:
        started = time.monotonic()
        found = understand({"model_type": name} if not name.endswith(".json") else _read(name))
        proven = sum(p.proven for p in found.proofs)
        missing = [p for p in found.proofs if not p.proven]
        complete += not missing
        seconds = time.monotonic() - started
        print(
            f"{name:<24} {len(found.proofs):>6} {proven:>6} {len(missing):>5} {len(found.novel):>5} {seconds:>6.1f}",
            flush=True,
        )
        for proof in found.proofs if options.claims else missing:
            print(f"    {_line(proof)}")
    print(f"{complete} of {len(names)} fully proven")
    return 0 if complete == len(names) else 3


def _read(path: str) -> dict[str, object]:
    import json
    from pathlib import Path

    data: dict[str, object] = json.loads(Path(path).read_text())
    return data


def _line(proof: Proof) -> str:
    mark = "ok  " if proof.proven else "OPEN"
    error = "" if proof.error is None else f" [{proof.error:.1e}]"
    return f"{mark} {proof.layers[:3] or ''} {proof.part}: {proof.claim}{error} {proof.reason}"


def hybrid_and_moe() -> list[str]:
    """Causal language models of transformers whose own code holds experts or a recurrence, by their modeling files."""
    import re
    from importlib import util
    from pathlib import Path

    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    spec = util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / "models"
    found = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        module = model_type_to_module_name(name)
        file = root / module / f"modeling_{module}.py"
        text = file.read_text() if file.exists() else ""
        experts = re.search(r"class \w*Experts\w*\(|nn\.ModuleList\(\[?\w*Expert|top_k_index", text)
        state = re.search(
            r"chunk_gated_delta|mamba|ssm_state|Lightning|rwkv_linear|recurrent_gate|kimi_delta|ShortConv|mlstm", text
        )
        if experts or state:
            found.append(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
