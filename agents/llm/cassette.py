"""Recorded exchanges: JSON lines, the first saying how they were made. Bodies only: no header, no key, ever."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from agents.llm.endpoint import Sender


class CassetteMiss(LookupError):
    """A request that was never recorded."""


def digest_of(body: dict[str, Any]) -> str:
    """What a recorded request is found by."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Recorder:
    """A sender that writes down what passes.

    Args:
        send: the real sender.
        path: the cassette; exchanges are appended.
        made: how they were made, for its first line: model, responder, date.
    """

    def __init__(self, send: Sender, path: Path, made: dict[str, str]) -> None:
        self.send, self.path = send, path
        self._lock = threading.Lock()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"cassette": 1, "made": made}) + "\n")

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send and write down."""
        completion = self.send(body)
        line = json.dumps({"request": digest_of(body), "body": body, "completion": completion})
        with self._lock, self.path.open("a") as file:  # searches side by side share one cassette
            file.write(line + "\n")
        return completion


class Player:
    """A sender that answers from a cassette; the same request twice gets its answers in the order of recording."""

    def __init__(self, path: Path) -> None:
        head, *lines = path.read_text().splitlines()
        self.made: dict[str, str] = json.loads(head)["made"]
        self._answers: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            exchange = json.loads(line)
            self._answers.setdefault(exchange["request"], []).append(exchange["completion"])

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        """The recorded answer.

        Raises:
            CassetteMiss: this request was not recorded.
        """
        found = self._answers.get(digest_of(body))
        if not found:
            raise CassetteMiss(f"no recorded answer for a request of {len(json.dumps(body))} characters")
        return found.pop(0) if len(found) > 1 else found[0]
