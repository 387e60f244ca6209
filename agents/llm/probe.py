"""What an endpoint can do, tried: ``python -m agents.llm.probe [--json]``; ``onboard doctor --llm`` shows it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from agents.llm import answers
from agents.llm.answers import MODES, Answer
from agents.llm.caller import remember
from agents.llm.endpoint import Endpoint, Reply
from agents.llm.errors import Invalid, LlmError, Refused
from onboarding.settings import AnswerMode, LlmSettings, Settings

PROBE_TOKENS = 400


class Sum(Answer):
    """The sum of two numbers."""

    total: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str
    allows: str = ""


def probe(settings: LlmSettings, endpoint: Endpoint | None = None, memory: Path | None = None) -> list[Finding]:
    """Try every form of answer with a small question; remembers the strictest that works."""
    if not settings.configured:
        detail = "ONBOARD_LLM_BASE_URL and ONBOARD_LLM_MODEL are not set"
        return [Finding(name="language model", ok=False, detail=detail, allows="kernels come from templates only")]
    endpoint = endpoint or Endpoint(settings)
    findings: list[Finding] = []
    works: list[AnswerMode] = []
    last: Reply | None = None
    for mode in MODES:
        finding, reply = _try(endpoint, mode, settings)
        findings.append(finding)
        last = reply or last
        if finding.ok:
            works.append(mode)
    if last is not None:
        usage = f"{last.tokens_in} read, {last.tokens_cached} of them cached, {last.tokens_out} written"
        told = bool(last.tokens_in and last.tokens_out)
        allows = "" if told else "the ledger holds estimates"
        findings.append(Finding(name="llm usage", ok=told, detail=usage if told else "not reported", allows=allows))
    if works:
        remember(memory, f"{settings.base_url} {settings.model}", works[0])
        detail = f"{settings.model} at {settings.base_url}: structured answers by {works[0]}"
        allows = "operators without a family are written, repaired and judged"
    else:
        detail, allows = f"{settings.model} at {settings.base_url}: no usable answer", "searches will fail"
    return [Finding(name="language model", ok=bool(works), detail=detail, allows=allows), *findings]


def _try(endpoint: Endpoint, mode: AnswerMode, settings: LlmSettings) -> tuple[Finding, Reply | None]:
    asked = [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": f"What is 17 + 25? {answers.instructions(Sum, mode)}"},
    ]
    name = f"llm answers by {mode}"
    try:
        reply = endpoint.ask(asked, answers.asking(Sum, mode), min(PROBE_TOKENS, settings.answer_tokens))
    except LlmError as error:
        return Finding(name=name, ok=False, detail=str(error)[:300]), None
    try:
        total = answers.read(reply.message, reply.finish_reason, Sum).total
    except (Invalid, Refused) as error:
        return Finding(name=name, ok=False, detail=f"{error}"[:300]), reply
    words = "right" if total == 42 else f"well-formed, but 17 + 25 = {total}"
    return Finding(name=name, ok=True, detail=f"{words}, {reply.seconds:.1f} s"), reply


def main() -> int:
    """Print the findings; exit status 1 without a usable language model."""
    settings = Settings()
    found = probe(settings.llm, memory=settings.resolved_home / "llm.json")
    if "--json" in sys.argv[1:]:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        for finding in found:
            print(f"{'ok ' if finding.ok else 'no '} {finding.name:24} {finding.detail}")
    return 0 if found[0].ok else 1


if __name__ == "__main__":
    sys.exit(main())
