"""Verify a bundle: every file against MANIFEST.sha256, and the manifest's Ed25519 signature.

Carried inside the bundle and free of dependencies, so that a bundle is checked before anything of it is imported.
The signature check follows RFC 8032, section 5.1.7, on affine integers: a few milliseconds, verification only,
nothing secret is handled here.

    python verify.py [FOLDER] [--key HEX]

A signature proves integrity; who signed it shows only against a key that you trust: ``--key``, or a line of
``trusted_keys`` in the user's configuration folder, where ``onboard bundle pull`` notes its service's key.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

MANIFEST = "MANIFEST.sha256"
SIGNATURE = "MANIFEST.sha256.sig"
PUBLIC_KEY = "public_key.hex"

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, _P - 2, _P) % _P
_SQRT_M1 = pow(2, (_P - 1) // 4, _P)

Point = tuple[int, int, int, int]
"""Extended coordinates (X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z."""


class BundleError(Exception):
    """The bundle is not what was signed; the message names the file and what is wrong."""


def verify(folder: Path | str, trusted_key: str | None = None) -> str:
    """Check a bundle folder and return the public key (hex) that signed it.

    Args:
        folder: the bundle's root.
        trusted_key: public key (64 hex digits) that must have signed; None accepts the key inside the bundle, which
            proves integrity but not who made it.

    Raises:
        BundleError: a file is missing, added or changed, or the signature does not fit.
    """
    root = Path(folder)
    for name in (MANIFEST, SIGNATURE, PUBLIC_KEY):
        if not (root / name).is_file():
            raise BundleError(f"{name} is missing: this is not a complete bundle")
    manifest = (root / MANIFEST).read_bytes()
    key = (root / PUBLIC_KEY).read_text().strip()
    if trusted_key is not None and trusted_key.lower() != key:
        raise BundleError(f"signed by {key}, not by the trusted key {trusted_key}")
    try:
        signature = bytes.fromhex((root / SIGNATURE).read_text().strip())
        public = bytes.fromhex(key)
    except ValueError as error:
        raise BundleError("the signature or the public key is not hexadecimal") from error
    if not ed25519_valid(public, signature, manifest):
        raise BundleError(f"{MANIFEST} does not match its signature")
    _check_files(root, _parse_manifest(manifest.decode()))
    return key


def trusted_keys_file() -> Path:
    """Where a user's trusted keys are listed: one key in hex a line, then anything."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "onboard" / "trusted_keys"


def trusted_keys() -> set[str]:
    """The keys that this user trusts."""
    try:
        lines = trusted_keys_file().read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[0].lower() for line in lines if line.strip()}


def verify_trusted(folder: Path | str, trusted_key: str | None = None) -> str:
    """Like :func:`verify`, but the key must be ``trusted_key`` or one that this user trusts.

    Raises:
        BundleError: the bundle is not intact, or nobody that is trusted here signed it.
    """
    key = verify(folder, trusted_key)
    if trusted_key is None and key not in trusted_keys():
        raise BundleError(
            f"every file is what was signed, but the signing key {key} is unknown here; if you have this key from the "
            f"signer, name it (--key, trusted_key=) or add it to {trusted_keys_file()}"
        )
    return key


def _parse_manifest(text: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        parts = Path(name).parts
        if len(digest) != 64 or not name or name.startswith("/") or ".." in parts:
            raise BundleError(f"malformed manifest line: {line!r}")
        entries[name] = digest
    return entries


def _check_files(root: Path, entries: dict[str, str]) -> None:
    present = set()
    for path in root.rglob("*"):
        if path.is_symlink():
            raise BundleError(f"{path.relative_to(root)} is a link")
        if path.is_file() and "__pycache__" not in path.parts:
            present.add(path.relative_to(root).as_posix())
    present -= {MANIFEST, SIGNATURE, PUBLIC_KEY}
    for name in sorted(entries.keys() - present):
        raise BundleError(f"{name} is missing")
    for name in sorted(present - entries.keys()):
        raise BundleError(f"{name} was added after signing")
    for name, digest in entries.items():
        if hashlib.sha256((root / name).read_bytes()).hexdigest() != digest:
            raise BundleError(f"{name} was changed after signing")


# ---- Ed25519 verification ------------------------------------------------------------------------------------


def ed25519_valid(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` (64 bytes) by ``public`` (32 bytes) fits ``message`` (RFC 8032, section 5.1.7)."""
    if len(public) != 32 or len(signature) != 64:
        return False
    a, r = _decompress(public), _decompress(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= _ORDER:
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % _ORDER
    left = _multiply(s, _base())
    right = _add(r, _multiply(h, a))
    return _equal(left, right)


def _add(p: Point, q: Point) -> Point:
    a = (p[1] - p[0]) * (q[1] - q[0]) % _P
    b = (p[1] + p[0]) * (q[1] + q[0]) % _P
    c = 2 * p[3] * q[3] * _D % _P
    d = 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiply(scalar: int, point: Point) -> Point:
    result: Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _equal(p: Point, q: Point) -> bool:
    return (p[0] * q[2] - q[0] * p[2]) % _P == 0 and (p[1] * q[2] - q[1] * p[2]) % _P == 0


def _base() -> Point:
    point = _decompress((4 * pow(5, _P - 2, _P) % _P).to_bytes(32, "little"))
    assert point is not None
    return point


def _decompress(data: bytes) -> Point | None:
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & ((1 << 255) - 1)
    if y >= _P:
        return None
    x2 = (y * y - 1) * pow(_D * y * y + 1, _P - 2, _P) % _P
    if x2 == 0:
        return None if sign else (0, y, 1, 0)
    x = pow(x2, (_P + 3) // 8, _P)
    if (x * x - x2) % _P:
        x = x * _SQRT_M1 % _P
    if (x * x - x2) % _P:
        return None
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def main(arguments: list[str]) -> int:
    """Command line: exit code 0 when the bundle is intact, 1 when not."""
    trusted = None
    if "--key" in arguments:
        at = arguments.index("--key")
        trusted = arguments[at + 1] if at + 1 < len(arguments) else ""
        arguments = arguments[:at] + arguments[at + 2 :]
    folder = Path(arguments[0]) if arguments else Path(__file__).parent
    try:
        key = verify_trusted(folder, trusted)
    except BundleError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    print(f"intact: {folder} signed by {key}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
