"""What a sandboxed process may use, and how its run ended. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Hard limits of one sandboxed run. Sizes in bytes, times in seconds."""

    wall_s: float = 60.0
    """From :meth:`Running.wait` to the end; the whole tree is killed when it passes."""
    memory_bytes: int = 4 * 2**30
    """Of the whole tree, files in memory included."""
    processes: int = 96
    """Processes and threads of the whole tree."""
    open_files: int = 512
    file_bytes: int = 2**30
    """Largest single file."""
    scratch_bytes: int = 2 * 2**30
    """All files under the scratch folder together."""
    output_bytes: int = 4 * 2**20
    """stdout and stderr together; a tree that prints more is killed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a sandboxed run ended."""

    returncode: int
    """Exit status; 128 + n for death by signal n."""
    reason: str
    """Empty for exit 0; else ``exit 3``, ``signal SIGSEGV``, ``time``, ``output``, ``disk`` or ``memory``."""
    wall_s: float
    stdout_tail: str
    stderr_tail: str

    @property
    def ok(self) -> bool:
        """Whether the process ended by itself with status 0."""
        return not self.reason
