"""Scripted responders, and a home for searches with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.solo import Solo
from onboarding.pipeline import JobOptions
from onboarding.settings import LlmSettings, Settings

Respond = Callable[[str, str, int], dict[str, Any]]
"""(schema's name, the whole prompt, number of the request) -> the answer as an object."""


class Scripted:
    """A sender whose answers a function gives; keeps the bodies."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        name = body["response_format"]["json_schema"]["name"]
        prompt = "\n".join(m["content"] for m in body["messages"])
        answer = self.respond(name, prompt, len(self.bodies) - 1)
        return {
            "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": json.dumps(answer)}}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 500},
        }


def written(source: str, decomposition: str = "") -> dict[str, Any]:
    return {"plan": "as the reference says", "decomposition": decomposition, "source": source}


def repaired(*edits: tuple[str, str], source: str = "") -> dict[str, Any]:
    return {"diagnosis": "a factor", "edits": [{"old": o, "new": n} for o, n in edits], "source": source}


def settings(home: Path, **llm: Any) -> Settings:
    told = LlmSettings(base_url="http://127.0.0.1:9/v1", model="scripted", price_in=1.0, price_out=2.0, **llm)
    return Settings(home=home, llm=told)


def solo(home: Path, respond: Respond, **llm: Any) -> tuple[Solo, Scripted]:
    sender = Scripted(respond)
    options = JobOptions(policy="llm", device="cpu", profile="quick")
    return Solo(settings=settings(home, **llm), options=options, send=sender, say=lambda text: None), sender
