"""What a sandboxed process sees of the host's files, every path at its own place.

Binding each prefix at the path it has outside keeps virtual environments, their symbolic links and ``python -m``
working whatever the folder's modes above them are: the sandbox makes the parents anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("kernel_templates", "runtime", "onboarding")
"""Our own packages that sandboxed code may import."""
ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds them."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, kw_only=True)
class View:
    """Files of one sandbox."""

    read_only: tuple[tuple[str, str], ...]
    """(host path without symbolic links, path inside), outer folders first."""
    symlinks: tuple[tuple[str, str], ...]
    """(target, path inside): ``/bin`` and kin on a merged /usr."""
    devices: tuple[str, ...]
    scratch: str
    """The one writable folder."""


def python_paths() -> list[Path]:
    """The running interpreter's prefixes, every hop of its executable's symbolic links, and our own packages."""
    paths = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix), Path(sys.base_exec_prefix)]
    hop = Path(sys.executable)
    for _ in range(8):
        paths.append(hop.parent.parent)
        if not hop.is_symlink():
            break
        hop = hop.parent / os.readlink(hop)
    for entry in sys.path:
        if entry.endswith(("site-packages", "dist-packages")):
            paths.append(Path(entry))
    paths += [Path(entry) for entry in _user_path()]
    paths += [ROOT / package for package in PACKAGES]
    # a prefix of "/" (a Python at /bin) would show the whole host; /usr is there anyway
    return [path for path in paths if path.is_dir() and path != Path("/")]


def import_path() -> str:
    """PYTHONPATH of a confined process: our packages, then what the user's own PYTHONPATH adds."""
    return os.pathsep.join([str(ROOT), *_user_path()])


def _user_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry.startswith("/")]


def gpu_devices() -> tuple[str, ...]:
    """Device nodes of NVIDIA GPUs."""
    found = sorted(Path("/dev").glob("nvidia*"))
    nodes = [node for path in found for node in ([path] if not path.is_dir() else sorted(path.iterdir()))]
    return tuple(str(node) for node in nodes)


def build_view(scratch: Path, read_only: Sequence[Path], *, gpu: bool) -> View:
    """Collect what the sandbox shows: system folders, interpreter, packages, ``read_only`` and scratch.

    Raises:
        FileNotFoundError: a path to be shown does not exist.
    """
    binds: dict[str, str] = {}
    symlinks: list[tuple[str, str]] = []
    for system in _SYSTEM:
        if os.path.islink(system):
            symlinks.append((os.readlink(system), system))
        elif os.path.isdir(system):
            binds[system] = system
    _add(binds, (Path(path) for path in _ETC if os.path.exists(path)))
    _add(binds, [Path("/sys")] if gpu else [path for path in [Path("/sys/devices/system/cpu")] if path.exists()])
    _add(binds, python_paths())
    _add(binds, read_only)
    ordered = sorted(binds.items(), key=lambda item: len(Path(item[0]).parts))
    kept: list[tuple[str, str]] = []
    for inside, host in ordered:
        # what lies in a folder that is shown already, at the same place, needs no bind of its own
        if not any(host == _under(inside, other, source) for source, other in kept):
            kept.append((host, inside))
    return View(
        read_only=tuple(kept),
        symlinks=tuple(symlinks),
        devices=tuple(d for d in _DEVICES if os.path.exists(d)) + (gpu_devices() if gpu else ()),
        scratch=str(scratch.resolve(strict=True)),
    )


def _add(binds: dict[str, str], paths: Iterable[Path]) -> None:
    for path in paths:
        host = str(path.resolve(strict=True))
        binds[os.path.abspath(path)] = host
        binds[host] = host


def _under(inside: str, folder: str, source: str) -> str | None:
    """Where ``inside`` comes from if ``folder`` (bound from ``source``) already covers it."""
    if inside == folder or inside.startswith(folder + "/"):
        return source + inside[len(folder) :]
    return None


def base_environment(scratch: str) -> dict[str, str]:
    """What a confined process finds in its environment: nothing of ours but what Python and CUDA need."""
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "USER": "nobody",
        "ONBOARD_CONFINED": "1",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "TRITON_CACHE_DIR": f"{scratch}/.triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/.inductor",
    }
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH"):
        if name in os.environ:
            env[name] = os.environ[name]
    return env
