"""A real HTTP server that speaks chat completions as badly as it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Script = Callable[[dict[str, Any], int], "Said"]
"""(request body, its number from 0) -> what to say."""


@dataclass(kw_only=True)
class Said:
    """One HTTP answer."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    trickle_s: float = 0.0
    """Seconds between single bytes of the body."""


def message(content: Any = None, *, finish: str = "stop", usage: bool = True, **members: Any) -> Said:
    """A completion with one assistant message."""
    completion: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [
            {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **members}}
        ],
    }
    if usage:
        completion["usage"] = {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 40},
        }
    return Said(body=json.dumps(completion).encode())


def error(status: int, text: str, **headers: str) -> Said:
    return Said(status=status, body=json.dumps({"error": {"message": text}}).encode(), headers=headers)


class LlmServer:
    """``with LlmServer(script) as server``: requests are kept in ``server.requests``."""

    def __init__(self, script: Script) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ended = threading.Event()
        outer = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append({name.title(): value for name, value in self.headers.items()})
                said = script(body, number)
                outer.ended.wait(said.hang_s)
                self.send_response(said.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said.body)))
                for name, value in said.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if said.trickle_s:
                    for byte in said.body:
                        if outer.ended.is_set():
                            return
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(said.trickle_s)
                else:
                    self.wfile.write(said.body)

            def handle(self) -> None:
                try:
                    super().handle()
                except (BrokenPipeError, ConnectionResetError):
                    return  # the client gave up, as it should

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> LlmServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, t: TracebackType | None) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


def in_turn(*said: Said) -> Script:
    """Say these one after the other; the last again and again."""
    return lambda body, number: said[min(number, len(said) - 1)]
