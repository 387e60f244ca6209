"""Unpacking untrusted archives: what is refused, and that honest ones come through unchanged."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onboarding.problem import Problem
from onboarding.stages.intake import archive
from onboarding.stages.intake.archive import normalised_tar, read_folder, safe_name, unpack


def tar_of(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as out:  # type: ignore[call-overload]
        for info, content in members:
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def plain(name: str, content: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def zip_of(*members: tuple[str, bytes], mode: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(info, content)
    return buffer.getvalue()


def kind_of(data: bytes) -> str:
    with pytest.raises(Problem) as caught:
        unpack(data)
    return caught.value.kind


EVIL_NAMES = [
    "../config.json",
    "a/../../b",
    "/etc/passwd",
    "C:/x",
    "c:x",
    "a\\b",
    "a\x01b",
    "..",
    "a/" * 20 + "b",
    "n" * 600,
]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_unsafe_paths_are_refused_in_tar_and_zip(name: str) -> None:
    assert kind_of(tar_of(plain(name))) == "unsafe-path"
    assert kind_of(zip_of((name, b"x"))) == "unsafe-path"


def test_a_nul_in_a_zip_name_is_refused() -> None:
    data = zip_of(("aXb.json", b"x")).replace(b"aXb.json", b"a\x00b.json")
    assert kind_of(data) == "unsafe-path"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind: bytes) -> None:
    assert kind_of(tar_of(plain("config.json"), special("link", kind, "/etc/passwd"))) == "unsafe-entry"


def test_a_symbolic_link_in_a_zip_is_refused() -> None:
    assert kind_of(zip_of(("link", b"/etc/passwd"), mode=0o120777)) == "unsafe-entry"


@pytest.mark.parametrize("pair", [("a.json", "a.json"), ("a.json", "A.JSON"), ("a", "a/b"), ("a/b", "A")])
def test_duplicates_and_collisions_are_refused(pair: tuple[str, str]) -> None:
    assert kind_of(tar_of(*map(plain, pair))) == "duplicate-file"


def test_a_bomb_is_refused_by_its_ratio() -> None:
    zeros = b"\0" * (8 * 2**20)
    assert kind_of(tar_of(plain("config.json", zeros), mode="w:gz")) == "archive-bomb"
    assert kind_of(zip_of(("config.json", zeros))) == "archive-bomb"


def test_caps_on_entries_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "CAPS", archive.Caps(entries=3, file_bytes=100, total_bytes=150))
    assert kind_of(tar_of(*(plain(f"{i}.json") for i in range(4)))) == "definition-too-large"
    assert kind_of(tar_of(plain("a", b"x" * 101))) == "definition-too-large"
    assert kind_of(zip_of(("a", b"x" * 90), ("b", b"y" * 90))) == "definition-too-large"


def test_damaged_and_foreign_content() -> None:
    whole = tar_of(plain("config.json", bytes(range(256)) * 40), mode="w:gz")
    assert kind_of(whole[: len(whole) // 2]) == "archive-damaged"
    assert kind_of(b"hello") == "not-an-archive"
    assert kind_of(b"PK\x03\x04" + b"\0" * 50) == "archive-damaged"


def test_links_in_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights").symlink_to("/etc")
    with pytest.raises(Problem) as caught:
        read_folder(tmp_path)
    assert caught.value.kind == "unsafe-entry"


NAMES = st.lists(st.text("abcXYZ019_-", min_size=1, max_size=8), min_size=1, max_size=3).map("/".join)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, st.binary(max_size=200), min_size=1, max_size=6))
def test_honest_archives_come_back_as_they_were(files: dict[str, bytes]) -> None:
    folded = {name.casefold() for name in files}
    assume(len(folded) == len(files))
    assume(not any(other.startswith(name + "/") for name in folded for other in folded))
    assert unpack(normalised_tar(files)) == files
    assert unpack(zip_of(*files.items())) == files
    assert normalised_tar(dict(reversed(files.items()))) == normalised_tar(files)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=600))
def test_noise_is_refused_never_a_crash(noise: bytes) -> None:
    for prefix in (b"", b"\x1f\x8b\x08", b"PK\x03\x04", b"BZh9"):
        try:
            unpack(prefix + noise)
        except Problem:
            continue


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flipped_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    whole = bytearray(tar_of(plain("config.json", b'{"model_type": "llama"}'), plain("a/b.py", b"import os")))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        files = unpack(bytes(whole))
    except Problem:
        return
    assert all(safe_name(name) == name for name in files)
