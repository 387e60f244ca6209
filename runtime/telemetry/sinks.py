"""Where measurements go: a JSONL file, a Prometheus text file or endpoint, TensorBoard's event files."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

Record = Mapping[str, Any]
"""``step`` and numbers by name; text, lists and mappings are for JSONL only."""


class Sink(Protocol):
    """Takes one record a step."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One object a line, flushed at once: a killed run loses no line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Prometheus:
    """The newest numbers as gauges ``onboard_run_<name>``.

    Args:
        file: replaced as a whole at every record, as the node exporter's text collector wants it; None writes none.
        port: of an endpoint on 127.0.0.1; 0 opens none, and -1 takes any that is free (``port`` then says which).
        labels: of every gauge.
    """

    def __init__(self, file: Path | None, port: int, labels: Mapping[str, str]) -> None:
        self._file = file
        self._labels = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
        self._text = b""
        self._server: ThreadingHTTPServer | None = None
        if port:
            self._server = ThreadingHTTPServer(("127.0.0.1", max(port, 0)), self._handler())
            threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        """That the endpoint listens on; 0 for none."""
        return int(self._server.server_address[1]) if self._server is not None else 0

    def write(self, record: Record) -> None:
        lines = []
        for name, value in numbers(record):
            metric = "onboard_run_" + "".join(c if c.isalnum() else "_" for c in name)
            lines += [f"# TYPE {metric} gauge", f"{metric}{{{self._labels}}} {value!r}"]
        self._text = ("\n".join(lines) + "\n").replace(" nan\n", " NaN\n").replace(" inf\n", " +Inf\n").encode()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside = self._file.with_suffix(".tmp")
            aside.write_bytes(self._text)
            os.replace(aside, self._file)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in ("/", "/metrics") else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                if self.path in ("/", "/metrics"):
                    self.wfile.write(sink._text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


class TensorBoard:
    """Scalars in TensorBoard's own format: length-prefixed, checksummed protocol buffers (tensorboard/record_writer).

    A record is: length (uint64), masked CRC-32C of it, the event, masked CRC-32C of the event. An event has wall_time
    (field 1, double), step (field 2, varint) and file_version (3) or a summary (5) of values {1: tag, 2: float}.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._event(0, _field(3, b"brain.Event:2"))

    def write(self, record: Record) -> None:
        step = int(record["step"])
        summary = b""
        for name, value in numbers(record):
            if name != "step":
                summary += _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
        self._event(step, _field(5, summary))

    def close(self) -> None:
        self._file.close()

    def _event(self, step: int, body: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + body
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
        self._file.flush()


def numbers(record: Record) -> list[tuple[str, float]]:
    """The numbers of a record, nested ones under ``outer/inner``."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            found.append((name, float(value)))
        elif isinstance(value, Mapping):
            found += [(f"{name}/{k}", v) for k, v in numbers(value)]
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(body)) + body


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    """CRC-32C (Castagnoli), rotated and offset as the format wants."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
