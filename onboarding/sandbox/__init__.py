"""The sandbox: runs untrusted code without network, without the host's files, within hard limits. Free of torch."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from onboarding.problem import Problem
from onboarding.sandbox import backends, process, warm
from onboarding.sandbox.limits import Limits, Outcome
from onboarding.sandbox.process import Running
from onboarding.sandbox.view import import_path

__all__ = ["Limits", "Outcome", "Running", "Sandbox", "run_module", "works"]

_CUDA_STARTS = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"


@functools.cache
def works(backend: backends.Backend, gpu: bool = False) -> str:
    """Try a backend: the interpreter must start inside (and CUDA, with ``gpu``). Empty if so, else why not."""
    if not backends.available(backend):
        return "not available here"
    with tempfile.TemporaryDirectory(prefix="onboard-trial-") as folder:
        argv = [sys.executable, "-I", "-S", "-c", _CUDA_STARTS if gpu else "pass"]
        running = process.start(
            backend, argv, scratch=Path(folder), read_only=[], limits=Limits(wall_s=20), env={}, gpu=gpu
        )
        outcome = running.wait()
    return "" if outcome.ok else f"{outcome.reason}: {outcome.stderr_tail.strip()[-300:]}"


class Sandbox:
    """A chosen backend.

    Args:
        gpu: the process may use the GPU (device nodes are shown; CUDA must start inside).
        unsafe: the operator allows running without any sandbox where none works.
        backend: name of the backend to use; the first that works by default, one that a warm parent can use if there
            is one.

    Raises:
        Problem: ``no-sandbox`` if none works and ``unsafe`` is not set.
    """

    def __init__(self, *, gpu: bool = False, unsafe: bool = False, backend: str = "") -> None:
        self.gpu = gpu
        failures = {}
        for candidate in backends.WARM_ORDER if warm.shared() and not gpu else backends.ORDER:
            if backend and candidate.name != backend:
                continue
            failures[candidate.name] = works(candidate, gpu)
            if not failures[candidate.name]:
                self.backend = candidate
                return
        if not unsafe:
            tried = "; ".join(f"{name}: {why}" for name, why in failures.items())
            raise Problem(
                "no-sandbox",
                "no sandbox works on this machine, so generated code is not run",
                f"install bubblewrap 0.8 or allow user namespaces or Landlock ({tried})",
                status=503,
            )
        self.backend = backends.NONE

    def describe(self) -> str:
        """The sandbox in words, for reports."""
        return self.backend.words + (", with the GPU's device nodes" if self.gpu else "")

    def start(
        self,
        argv: Sequence[str],
        *,
        scratch: Path,
        read_only: Sequence[Path] = (),
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> Running:
        """Start ``argv`` (absolute program path) confined; see :func:`onboarding.sandbox.process.start`."""
        return process.start(
            self.backend,
            argv,
            scratch=scratch,
            read_only=read_only,
            limits=limits or Limits(),
            env=env or {},
            fds=fds,
            gpu=self.gpu,
        )

    def start_module(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        scratch: Path,
        read_only: Sequence[Path] = (),
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        fds: Sequence[int] = (),
        prefix: Sequence[str] = (),
    ) -> Running:
        """Start ``python -m module`` (of this project) confined: forked from the warm parent where there is one.

        The module's arguments are the numbers under which it inherits ``fds``, then ``args``. A warm parent never
        serves a program that may use the GPU, or that is run by another one (``prefix``, its command line).
        """
        parent = warm.shared()
        if parent and not prefix and not self.gpu and self.backend.confines and self.backend is not backends.BUBBLEWRAP:
            try:
                return process.start_warm(
                    parent,
                    self.backend,
                    module,
                    args,
                    scratch=scratch,
                    read_only=read_only,
                    limits=limits or Limits(),
                    env=env or {},
                    fds=fds,
                )
            except warm.WarmUnavailable:
                warm.give_up()
        argv, own = module_command(module, [*map(str, fds), *args])
        return self.start(
            [*prefix, *argv], scratch=scratch, read_only=read_only, limits=limits, env=own | (env or {}), fds=fds
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        scratch: Path,
        read_only: Sequence[Path] = (),
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        fds: Sequence[int] = (),
        on_line: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run ``argv`` to its end or to a limit.

        Args:
            scratch: the one folder it may write to, its working directory and home.
            read_only: further files and folders it may read, at their own paths.
            env: added to a minimal environment.
            fds: descriptors it inherits under the same numbers.
            on_line: called with each line of its stdout.
        """
        running = self.start(argv, scratch=scratch, read_only=read_only, limits=limits, env=env, fds=fds)
        return running.wait(on_line)

    def run_module(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        scratch: Path,
        read_only: Sequence[Path] = (),
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        fds: Sequence[int] = (),
        on_line: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run ``python -m module`` to its end or to a limit; see :meth:`start_module`."""
        running = self.start_module(module, args, scratch=scratch, read_only=read_only, limits=limits, env=env, fds=fds)
        return running.wait(on_line)


def module_command(module: str, args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """argv and environment that run a module of this project with this interpreter."""
    # -P: the working directory is the candidate's scratch folder and must not be a place to import from
    return [sys.executable, "-P", "-m", module, *args], {"PYTHONPATH": import_path()}


def run_module(
    module: str,
    args: Sequence[str] = (),
    *,
    scratch: Path,
    read_only: Sequence[Path] = (),
    limits: Limits | None = None,
    env: dict[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    gpu: bool = False,
    unsafe: bool = False,
) -> Outcome:
    """:meth:`Sandbox.run_module` in the best sandbox that works here."""
    return Sandbox(gpu=gpu, unsafe=unsafe).run_module(
        module, args, scratch=scratch, read_only=read_only, limits=limits, env=env, on_line=on_line
    )
