"""The judge's end of the candidate's process: asks, waits within limits, and turns every way to die into a reason."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onboarding.problem import Problem
from onboarding.sandbox import Limits, Outcome, Sandbox

LONGEST_REPLY = 2**20
PATIENCE = 6.0
IDLE_S = 30.0
"""Seconds by the clock without any CPU time after which a process is asleep; a busy machine gives each its share."""
CHILD = "onboarding.stages.judge.child"


class Refusal(Exception):
    """The candidate is refused; the message is the reason."""


class Examinee:
    """One confined, single-use process for one candidate; it starts before the candidate is known.

    Args:
        folder: private; ``given`` (read-only for the process) and ``work`` (its scratch) are made in it.
        device: ``cpu`` or ``cuda``.
        answer_s: longest time for one answer: CPU seconds of the process, or :data:`PATIENCE` times as long by the
            clock. A machine that is busy with other work makes no candidate wrong.
        child: module that serves the requests; the candidate's by default.
        arguments: more of them for that module.
        prefix: command line that the process is run by; it is started afresh then.
        env: added to its environment.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        folder: Path,
        device: str,
        limits: Limits,
        answer_s: float,
        *,
        child: str = CHILD,
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.given, self.work = folder / "given", folder / "work"
        for place in (folder, self.given, self.work):
            place.mkdir(exist_ok=True)
            place.chmod(0o755)
        self.sandbox, self.limits, self._answer_s = sandbox, limits, answer_s
        child_reads, self._requests = os.pipe()
        self._replies, child_writes = os.pipe()
        try:
            self._running = sandbox.start_module(
                child,
                [device, *arguments],
                scratch=self.work,
                read_only=[self.given],
                limits=limits,
                env={"OMP_NUM_THREADS": "1"} | (env or {}),
                fds=[child_reads, child_writes],
                prefix=prefix,
            )
        finally:
            os.close(child_reads)
            os.close(child_writes)
        os.set_blocking(self._replies, False)
        os.set_blocking(self._requests, False)
        self._received = b""
        self._cpu_limit = 240.0
        self._next_look = 0.0
        self._cpu_seen, self._active = 0.0, time.monotonic()
        self._started = time.monotonic()

    def ready(self) -> dict[str, Any]:
        """Wait until torch and Triton are imported; their versions.

        Raises:
            Problem: ``judge-start-failed``: not the candidate's fault, it is not there yet.
        """
        try:
            return self._answer(300.0)
        except Refusal as failure:
            raise Problem(
                "judge-start-failed", "the judge's child process did not start", str(failure), status=500
            ) from failure

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            Refusal: the candidate raised, died, hung, or exceeded a limit.
        """
        deadline = time.monotonic() + self._answer_s * PATIENCE
        self._cpu_limit = self._running.cpu_seconds() + self._answer_s
        self._active = time.monotonic()  # it waited for us, not we for it
        message = json.dumps(request).encode() + b"\n"
        while message:
            try:
                message = message[os.write(self._requests, message) :]
            except BlockingIOError:
                self._turn(deadline)
            except BrokenPipeError:
                self._turn(deadline)
                break
        answer = self._answer(deadline - time.monotonic())
        if answer.get("ok") is not True:
            where = f" (in {answer['where']})" if answer.get("where") else ""
            raise Refusal(f"it raised {answer.get('error', 'nothing that can be read')}{where}")
        return answer

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if len(self._received) > LONGEST_REPLY:
                raise Refusal("its process wrote noise instead of an answer")
            if self._turn(deadline):
                with contextlib.suppress(BlockingIOError):
                    data = os.read(self._replies, 65536)
                    if not data:  # closed: it ended, or closed the channel
                        for _ in range(50):  # five seconds for the process to say how it ended
                            self._turn(math.inf, read=False)
                        raise Refusal("its process closed the channel to the judge")
                    self._received += data
        line, self._received = self._received.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as noise:
            raise Refusal("its process wrote noise instead of an answer") from noise
        if not isinstance(answer, dict):
            raise Refusal("its process wrote noise instead of an answer")
        return answer

    def _turn(self, deadline: float, *, read: bool = True) -> bool:
        """Wait a little; whether there is something to read.

        Raises:
            Refusal: a limit is exceeded or the process has ended.
        """
        now = time.monotonic()
        if now > deadline:
            raise Refusal(self._reason("time"))
        if now > self._next_look:
            self._next_look = now + 0.5
            used = self._running.cpu_seconds()
            if used > self._cpu_limit:
                raise Refusal(self._reason("time"))
            if used > self._cpu_seen + 0.01:
                self._cpu_seen, self._active = used, now
            elif now - self._active > IDLE_S:
                raise Refusal(self._reason("idle"))
        if now - self._started > self.limits.wall_s:
            raise Refusal(self._reason("time"))
        readable, reason = self._running.watch(self._replies if read else None, min(0.1, deadline - now))
        if reason and not (readable and reason == "exit"):
            raise Refusal(self._reason(reason))
        return readable

    def _reason(self, reason: str) -> str:
        """End the process and say why in words."""
        outcome = self.close("" if reason == "exit" else reason)
        said = outcome.stderr_tail.strip().splitlines()[-1:] or [""]
        words = {
            "": "its process ended early with status 0",
            "idle": f"it sleeps: no work for {IDLE_S:g} s",
            "time": f"it did not finish within {self._answer_s:g} s of work",
            "output": f"it printed more than {self.limits.output_bytes >> 20} MiB",
            "disk": f"it wrote more than {self.limits.scratch_bytes >> 20} MiB",
            "memory": f"it used more than {self.limits.memory_bytes >> 20} MiB of memory",
            "processes": f"it started more than {self.limits.processes} processes",
        }
        if outcome.reason in words:
            return words[outcome.reason]
        return f"its process died: {outcome.reason}" + (f" ({said[0][:300]})" if said[0] else "")

    def leave(self, seconds: float = 60.0) -> None:
        """Let the process end by itself: it does when nobody asks any more."""
        os.close(self._requests)
        self._requests = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Refusal):
            while time.monotonic() < deadline:
                self._turn(math.inf, read=False)

    _outcome: Outcome | None = None

    def close(self, reason: str = "") -> Outcome:
        """End the process and everything it started."""
        if self._outcome is None:
            for descriptor in (self._requests, self._replies):
                os.close(descriptor)
            self._outcome = self._running.close(reason)
        return self._outcome
