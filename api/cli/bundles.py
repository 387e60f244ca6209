"""Bundles on this machine: fetched, unpacked safely, verified."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from api.cli.client import Client
from onboarding.problem import Problem
from onboarding.stages.intake.archive import unpack
from onboarding.stages.package.bundle_files.verify import BundleError, trusted_keys, trusted_keys_file, verify_trusted


def verify(folder: Path, trusted_key: str | None = None) -> str:
    """Check every file of a bundle, its signature, and that a trusted key made it; returns that key in hex.

    Raises:
        Problem: it is not what was signed, or nobody that is trusted here signed it.
    """
    try:
        return str(verify_trusted(folder, trusted_key))
    except BundleError as error:
        detail = "do not load it; pull it again with 'onboard bundle pull'"
        raise Problem("bundle-not-verified", f"{folder}: {error}", detail) from None
    except OSError as error:
        raise Problem("no-bundle", f"{folder} is not a bundle", str(error)) from None


def pull(client: Client, job_id: str, to: Path, *, replace: bool = False) -> Path:
    """Fetch a job's bundle into ``to``; what is left there has been verified.

    Raises:
        Problem: no bundle yet, not verified, or another one is in its place.
    """
    result = client.result(job_id, "package")
    name = str(result["bundle_name"])
    if name != os.path.basename(name) or name.startswith("."):
        raise Problem("unsafe-path", f"the bundle is named {name!r}", "that is not the name of a folder")
    files = unpack(client.artifact(job_id, result["bundle"]["digest"]))
    to.mkdir(parents=True, exist_ok=True)
    target = to / name
    with tempfile.TemporaryDirectory(dir=to, prefix=".pull-") as aside:
        fresh = Path(aside) / name
        for path, content in files.items():
            place = Path(aside) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        verify(fresh, str(result["public_key"]))
        if target.exists() and not replace and not same(target, fresh):
            title = f"{target} exists and holds something else"
            raise Problem("target-exists", title, "remove it, choose another folder with --to, or pass --replace")
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)
    trust(str(result["public_key"]), client)
    return target


def trust(key: str, client: Client) -> None:
    """Note the key of a service that this user is signed in to, so that its bundles verify from now on."""
    if key in trusted_keys():
        return
    path = trusted_keys_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{key}  {client.url}\n")


def same(one: Path, other: Path) -> bool:
    """Whether two bundles have the same manifest."""
    paths = one / "MANIFEST.sha256", other / "MANIFEST.sha256"
    return all(path.is_file() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()
