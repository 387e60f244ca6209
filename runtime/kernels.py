"""A bundle's kernels in a model, by the bundle's own ``apply.py``, which is checked before it runs."""

from __future__ import annotations

import importlib.util
import os
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from torch import nn

from runtime.config import ModelConfig
from runtime.refusal import Refused

FILES = ("bundle.json", "MANIFEST.sha256", "MANIFEST.sha256.sig", "public_key.hex")
"""That make a folder a bundle; the last three are not in the manifest."""


def check_bundle(choice: ModelConfig) -> str:
    """Check signature, signer and every file without running anything of the bundle; gives the signer's key in hex.

    Raises:
        Refused: ``bundle-missing``, ``bundle-not-verified``.
    """
    root = _root(choice)
    key = (root / "public_key.hex").read_text().strip().lower()
    known = {choice.trusted_key.lower()} if choice.trusted_key is not None else trusted_keys()
    if key not in known:
        raise _unverified(root, f"the signing key {key} is not trusted here", "name it as model.trusted_key, or pull")
    manifest = (root / "MANIFEST.sha256").read_bytes()
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex((root / "MANIFEST.sha256.sig").read_text().strip()), manifest)
    except (ValueError, InvalidSignature):
        raise _unverified(root, "the manifest does not match its signature", "pull") from None
    listed = {name: line for line, _, name in (row.partition("  ") for row in manifest.decode().splitlines())}
    present = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    for name in sorted(present - set(FILES[1:]) ^ set(listed)):
        raise _unverified(root, f"{name} is {'missing' if name in listed else 'not part of it'}", "pull")
    for name, expected in listed.items():
        if (root / name).is_symlink() or sha256((root / name).read_bytes()).hexdigest() != expected:
            raise _unverified(root, f"{name} was changed after signing", "pull")
    return key


def trusted_keys() -> set[str]:
    """Public keys that this user trusts: one in hex a line, where ``onboard bundle pull`` notes its service's."""
    base = os.environ.get("XDG_CONFIG_HOME")
    path = (Path(base) if base else Path.home() / ".config") / "onboard" / "trusted_keys"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {line.split()[0].lower() for line in lines if line.strip()}


def apply_bundle(model: nn.Module, choice: ModelConfig, tokens: int) -> Any:
    """Put the kernels in; gives what was put where.

    On a GPU the kernels of a step of ``tokens`` tokens are compiled now, by one rank of each host: the others find
    them in Triton's cache.

    Raises:
        Refused: ``kernels-refused`` where their verdicts do not cover this device.
    """
    key = check_bundle(choice)
    root = _root(choice)
    apply = _load(root, "apply")
    try:
        return apply.apply(
            model,
            bundle=root,
            trusted_key=key,
            allow_unproven=choice.unproven_kernels,
            tokens=tokens if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None,
        )
    except apply.KernelRefused as error:
        advice = "judge the model on this device, or train without the bundle"
        raise Refused("kernels-refused", str(error), advice) from None


def _root(choice: ModelConfig) -> Path:
    assert choice.bundle is not None
    root = Path(choice.bundle).resolve()
    missing = [n for n in FILES if not (root / n).is_file()]
    if missing:
        raise Refused("bundle-missing", f"{root} is not a bundle", f"it has no {', '.join(missing)}")
    return root


def _unverified(root: Path, why: str, fix: str) -> Refused:
    advice = f"{fix} it again with 'onboard bundle pull'" if fix.endswith("pull") else fix
    return Refused("bundle-not-verified", f"{root}: {why}", advice)


def _load(root: Path, name: str) -> ModuleType:
    """A module of the bundle under a name of its own."""
    key = f"_bundle_{name}_{sha256(str(root).encode()).hexdigest()[:8]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, root / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    spec.loader.exec_module(module)
    return module
