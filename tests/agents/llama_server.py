"""A small model behind chat completions, in a process of its own: ``llama_server.py MODEL.gguf`` prints its port.

Streaming, tools and schemas are not served, as in many small servers; JSON mode is, by a grammar.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import llama_cpp  # optional, see test_real_model.py

LONGEST_PROMPT = 9_000
LONGEST_ANSWER = 64


class Handler(BaseHTTPRequestHandler):
    """Answers one request at a time."""

    model: Any = None

    def do_POST(self) -> None:
        """A chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = (body.get("response_format") or {}).get("type")
        if wanted == "json_schema" or "tools" in body:
            return self.say(400, {"error": {"message": "response_format json_schema and tools are not served"}})
        if sum(len(m["content"]) for m in body["messages"]) > LONGEST_PROMPT:
            return self.say(400, {"error": {"message": "the prompt exceeds the context window"}})
        completion = self.model.create_chat_completion(
            messages=body["messages"],
            max_tokens=min(int(body["max_tokens"]), LONGEST_ANSWER),
            temperature=0.0,
            response_format={"type": "json_object"} if wanted else None,
        )
        return self.say(200, completion)

    def say(self, status: int, content: dict[str, Any]) -> None:
        """Send JSON."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


if __name__ == "__main__":
    Handler.model = llama_cpp.Llama(model_path=sys.argv[1], n_ctx=4096, n_threads=1, seed=1, verbose=False)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
