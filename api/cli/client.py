"""The REST API as the command line uses it."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import httpx

from onboarding.problem import Problem
from onboarding.settings import Settings


class Unreachable(Problem):
    """No service answers."""


class Client:
    """A connection to the service that the settings name.

    Args:
        settings: where the service and the key are.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.url = settings.base_url()
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(30.0, connect=3.0), trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def alive(self) -> bool:
        """Whether a service answers."""
        try:
            return self._http.get("/healthz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def key(self) -> str:
        """The API key: from the environment, else from the key file.

        Raises:
            Problem: there is none yet.
        """
        if self.settings.api_key is not None:
            return self.settings.api_key.get_secret_value()
        path = self.settings.key_file.expanduser()
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            title = f"no API key in {path}"
            raise Problem("no-key", title, "start the service with 'onboard serve', or set ONBOARD_API_KEY") from None

    def call(self, method: str, path: str, **request: Any) -> Any:
        """One request; the decoded answer.

        Raises:
            Unreachable: no service answers.
            Problem: what the service refused, as it said it.
        """
        return self._send(method, path, **request).json()

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key()}", **request.pop("headers", {})}
        try:
            answer = self._http.request(method, path, headers=headers, **request)
        except httpx.TransportError as error:
            title = f"no service answers at {self.url}"
            raise Unreachable("unreachable", title, f"start it with 'onboard serve' ({type(error).__name__})") from None
        if answer.is_error:
            raise problem_of(answer)
        return answer

    def submit(self, what: str, *, name: str | None, options: dict[str, Any]) -> dict[str, Any]:
        """Submit a path or the name of an example.

        Raises:
            Problem: neither, or refused.
        """
        path = Path(what)
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        if not path.exists():
            if "/" in what or what.endswith((".json", ".py", ".zip", ".tar", ".gz")):
                raise Problem("no-such-path", f"{what} does not exist", "give a config.json, a folder or an archive")
            body = {"example": what, "options": options, **({"name": name} if name else {})}
            answer: dict[str, Any] = self.call("POST", "/v1/jobs", json=body, headers=headers)
            return answer
        form = {"options": json.dumps(options), "name": name or default_name(path)}
        answer = self.call("POST", "/v1/jobs", data=form, files=upload_of(path), headers=headers)
        return answer

    def job(self, job_id: str) -> dict[str, Any]:
        """A job with its stages."""
        answer: dict[str, Any] = self.call("GET", f"/v1/jobs/{job_id}")
        return answer

    def result(self, job_id: str, stage: str) -> dict[str, Any]:
        """The result of a stage that runs once.

        Raises:
            Problem: it has none yet.
        """
        results = self.call("GET", f"/v1/jobs/{job_id}/stages/{stage}")["results"]
        if not results or not results[-1]["result"]:
            title = f"job {job_id} has no {stage} result"
            raise Problem("no-result", title, f"see 'onboard watch {job_id}'", status=404)
        result: dict[str, Any] = results[-1]["result"]
        return result

    def artifact(self, job_id: str, digest: str) -> bytes:
        """An artifact's content, checked against its digest.

        Raises:
            Problem: damaged on the way.
        """
        content = self._send("GET", f"/v1/jobs/{job_id}/artifacts/{digest}").content
        if hashlib.sha256(content).hexdigest() != digest:
            raise Problem("artifact-damaged", "the download does not have its digest", digest)
        return content

    def sign_in_link(self, page: str) -> str:
        """A one-time address that opens a page in a browser."""
        return f"{self.call('POST', '/v1/signin-links')['url']}&to={page}"


def problem_of(answer: httpx.Response) -> Problem:
    """The refusal in an answer."""
    try:
        return Problem.from_dict(answer.json())
    except ValueError:
        title = f"the service answered {answer.status_code}"
        return Problem("http-error", title, answer.text[:200], status=answer.status_code)


def default_name(path: Path) -> str:
    """What to call a model that is given by its path; empty lets the service decide."""
    resolved = path.resolve()
    if resolved.is_dir():
        return resolved.name
    return resolved.parent.name if resolved.name == "config.json" else ""


def upload_of(path: Path) -> list[tuple[str, tuple[str, bytes]]]:
    """The files of a form: one file, or those of a folder that belong to a definition.

    Weights are left out: they are large and not needed.
    """
    if path.is_file():
        return [("files", (path.name, path.read_bytes()))]
    wanted = {".json", ".py", ".txt", ".md", ".model", ".jinja", ".tiktoken"}
    found = sorted(item for item in path.rglob("*") if item.suffix in wanted and item.is_file())
    kept = [item for item in found if not any(part.startswith(".") for part in item.relative_to(path).parts)]
    if not kept:
        raise Problem("no-config", f"{path} has no config.json", "give the folder of a model definition")
    return [("files", (str(item.relative_to(path)), item.read_bytes())) for item in kept]
