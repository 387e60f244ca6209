"""compute-sanitizer: its log is read as it writes it; where it is not installed the verdict says so."""

from __future__ import annotations

import pytest

from onboarding.stages.judge import sanitizer

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
# the layout of the tool's own documentation
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _forward_kernel+0x170 in candidate.py:41
=========     by thread (0,0,0) in block (3,0,0)
=========     Address 0x7f2c00000400 is out of bounds
========= Invalid __global__ write of size 4 bytes
=========     at _forward_kernel+0x170 in candidate.py:41
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel+0x200 and Read access at kernel+0x240 [64 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (CLEAN, []),
        (INVALID, ["Invalid __global__ write of size 4 bytes"]),
        (
            RACE,
            ["Error: Race reported between Write access at kernel+0x200 and Read access at kernel+0x240 [64 hazards]"],
        ),
        (
            # as an H200 wrote it
            RACE.replace(" and Read access", " in candidate.py:51\n=========     and Read access"),
            [
                "Error: Race reported between Write access at kernel+0x200 in candidate.py:51 "
                "and Read access at kernel+0x240 [64 hazards]"
            ],
        ),
        ("========= ERROR SUMMARY: 3 errors\n", ["errors that its log does not name"]),
        ("========= COMPUTE-SANITIZER\n", None),
        ("", None),
    ],
)
def test_logs_are_read(log: str, found: list[str] | None) -> None:
    assert sanitizer.errors_in(log) == found


def test_an_absent_tool_is_named_and_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: "")
    reasons, absent = sanitizer.examine(None, None)  # type: ignore[arg-type]  # neither is looked at
    assert reasons == []
    assert absent == ["compute-sanitizer: it is not installed here"]
