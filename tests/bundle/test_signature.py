"""The bundle's own verifier against an independent Ed25519 and against tampering."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from onboarding.stages.package.bundle_files import verify as verifier
from onboarding.stages.package.bundle_files.verify import BundleError, ed25519_valid, verify
from onboarding.stages.package.signing import sign_folder, signing_key

# RFC 8032, section 7.1, tests 1 to 3: (public key, message, signature).
RFC_8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("public", "message", "signature"), RFC_8032)
def test_published_vectors(public: str, message: str, signature: str) -> None:
    assert ed25519_valid(bytes.fromhex(public), bytes.fromhex(signature), bytes.fromhex(message))


@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 63), st.integers(1, 255))
def test_agrees_with_cryptography_and_refuses_any_flipped_byte(message: bytes, at: int, mask: int) -> None:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    signature = key.sign(message)
    assert ed25519_valid(public, signature, message)
    flipped = bytearray(signature)
    flipped[at] ^= mask
    assert not ed25519_valid(public, bytes(flipped), message)
    assert not ed25519_valid(public, signature, message + b"x")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "kernels").mkdir(parents=True)
    (folder / "bundle.json").write_text("{}")
    (folder / "kernels" / "a.py").write_text("x = 1\n")
    sign_folder(folder, signing_key(tmp_path / "signing.key"))
    return folder


def test_intact_bundle_verifies_and_names_its_key(bundle: Path, tmp_path: Path) -> None:
    key = signing_key(tmp_path / "signing.key")
    assert verify(bundle) == key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    assert (tmp_path / "signing.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda b: (b / "kernels" / "a.py").write_text("x = 2\n"), "kernels/a.py was changed"),
        (lambda b: (b / "kernels" / "a.py").unlink(), "kernels/a.py is missing"),
        (lambda b: (b / "extra.py").write_text(""), "extra.py was added"),
        (lambda b: (b / "link.py").symlink_to(b / "bundle.json"), "link.py is a link"),
        (lambda b: (b / verifier.SIGNATURE).write_text("zz"), "not hexadecimal"),
        (lambda b: (b / verifier.SIGNATURE).unlink(), "is missing"),
        (
            lambda b: (b / verifier.MANIFEST).write_text((b / verifier.MANIFEST).read_text().replace("a", "b", 1)),
            "does not match its signature",
        ),
    ],
)
def test_tampering_is_named(bundle: Path, tamper: object, message: str) -> None:
    tamper(bundle)  # type: ignore[operator]
    with pytest.raises(BundleError, match=message):
        verify(bundle)


def test_another_trusted_key_refuses(bundle: Path) -> None:
    with pytest.raises(BundleError, match="not by the trusted key"):
        verify(bundle, "00" * 32)


def test_a_bundle_resigned_by_another_is_not_trusted(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ours = verify(bundle)
    trusted = tmp_path / "onboard" / "trusted_keys"
    trusted.parent.mkdir()
    trusted.write_text(f"{ours.upper()}  our service\n")
    assert verifier.verify_trusted(bundle) == ours
    (bundle / "kernels" / "a.py").write_text("x = 'planted'\n")
    for name in (verifier.MANIFEST, verifier.SIGNATURE, verifier.PUBLIC_KEY):
        (bundle / name).unlink()
    theirs, _ = sign_folder(bundle, signing_key(tmp_path / "another.key"))
    assert verify(bundle) == theirs, "it is intact, which proves nothing about who signed it"
    with pytest.raises(BundleError, match=f"signing key {theirs} is unknown here"):
        verifier.verify_trusted(bundle)
    assert verifier.verify_trusted(bundle, theirs) == theirs


def test_verifier_runs_alone(bundle: Path, tmp_path: Path) -> None:
    script = tmp_path / "verify.py"
    script.write_bytes(Path(verifier.__file__).read_bytes())
    command = [sys.executable, "-I", str(script), str(bundle), "--key", verify(bundle)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (bundle / "extra").write_text("")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "extra was added" in run.stderr
