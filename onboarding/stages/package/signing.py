"""The operator's signing key, the manifest, and the signature. Free of torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from onboarding.stages.package.bundle_files.verify import MANIFEST, PUBLIC_KEY, SIGNATURE


def signing_key(path: Path) -> Ed25519PrivateKey:
    """The key at ``path`` (32 raw bytes, mode 0600), made on first use.

    Several workers may start at once: the file is created exclusively, and the loser reads the winner's key.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = Ed25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
        try:
            os.link(temporary, path)  # fails if another worker was first; never replaces
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return Ed25519PrivateKey.from_private_bytes(path.read_bytes())


def sign_folder(folder: Path, key: Ed25519PrivateKey) -> tuple[str, str]:
    """Write manifest, public key and signature into a bundle folder.

    Returns:
        (public key as hex, sha256 of the manifest as hex).
    """
    lines = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n")
    manifest = "".join(lines).encode()
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    (folder / MANIFEST).write_bytes(manifest)
    (folder / SIGNATURE).write_text(key.sign(manifest).hex() + "\n")
    (folder / PUBLIC_KEY).write_text(public + "\n")
    return public, hashlib.sha256(manifest).hexdigest()
