"""Reading a submission off the wire: JSON or multipart in, one checked definition out. Nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from onboarding.examples import example_files
from onboarding.pipeline import JobOptions
from onboarding.problem import Problem
from onboarding.stages.intake.check import check_definition

MAX_PARTS = 512
NAME_LENGTH = 128
FIELDS = frozenset({"files", "name", "options"})


class JobRequest(BaseModel):
    """The JSON body of ``POST /v1/jobs``: an example's name or a configuration."""

    model_config = ConfigDict(extra="forbid")

    example: str | None = Field(None, max_length=NAME_LENGTH)
    config: dict[str, Any] | None = None
    name: str | None = Field(None, max_length=NAME_LENGTH)
    options: JobOptions = JobOptions()


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A checked model definition, ready to be stored as an artifact."""

    name: str
    model_type: str
    file_name: str
    media_type: str
    content: bytes
    """``config.json`` itself if that is all there is, else a tar of the checked files."""
    options: JobOptions

    def digest(self) -> str:
        """Identity of the request for Idempotency-Key: what was sent, not how it was encoded."""
        facts = [hashlib.sha256(self.content).hexdigest(), self.name, self.options.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def prepare(source: dict[str, bytes] | bytes, name: str | None, options: JobOptions) -> Submission:
    """Check a definition and bring it into the form in which it is stored.

    Raises:
        Problem: the definition is refused.
    """
    checked = check_definition(source)
    file_name, media_type, content = checked.stored()
    return Submission(
        name=(name or checked.name or checked.model_type)[:NAME_LENGTH],
        model_type=checked.model_type,
        file_name=file_name,
        media_type=media_type,
        content=content,
        options=options,
    )


def options_of(data: Any) -> JobOptions:
    """Job options from JSON.

    Raises:
        Problem: the first field that is wrong (422).
    """
    try:
        return JobOptions.model_validate(data)
    except ValidationError as error:
        raise validation_problem(error, "options") from None


def validation_problem(error: ValidationError, where: str = "") -> Problem:
    """The first complaint about a body, as a problem."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in (*filter(None, [where]), *first["loc"])) or "body"
    return Problem("invalid-request", f"{field}: {first['msg']}", "the API's description is at /docs", field=field)


def parse_json(raw: bytes, what: str) -> Any:
    """JSON with the position of the fault in the refusal.

    Raises:
        Problem: not UTF-8, or not JSON (422).
    """
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        where = {"line": error.lineno, "column": error.colno}
        raise Problem("malformed-json", f"{what} is not valid JSON", str(error), **where) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise Problem("malformed-json", f"{what} is not valid JSON", str(error)) from None


async def read_submission(request: Request) -> Submission:
    """Read and check the request's model definition. The body's size is capped by the application.

    Raises:
        Problem: wrong content type (415), or anything malformed (422).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        return await run_in_threadpool(_from_json, await request.body())
    if content_type == "multipart/form-data":
        async with request.form(max_files=MAX_PARTS, max_fields=len(FIELDS)) as form:
            return await _from_form(form)
    raise Problem(
        "unsupported-media-type",
        f"content type {content_type or '(none)'} is not accepted",
        "send application/json, or multipart/form-data with config.json, several files, or one archive",
        status=415,
    )


def _from_json(raw: bytes) -> Submission:
    body = parse_json(raw, "the body")
    try:
        wanted = JobRequest.model_validate(body)
    except ValidationError as error:
        raise validation_problem(error) from None
    if (wanted.example is None) == (wanted.config is None):
        title = "give either 'example' or 'config'"
        raise Problem("invalid-request", title, "exactly one of the two says which model", field="example")
    if wanted.example is not None:
        return prepare(example_files(wanted.example), wanted.name or wanted.example, wanted.options)
    return prepare({"config.json": json.dumps(wanted.config).encode()}, wanted.name, wanted.options)


async def _from_form(form: FormData) -> Submission:
    unknown = sorted(set(form) - FIELDS)
    if unknown:
        title = f"unknown form field '{unknown[0]}'"
        raise Problem("invalid-request", title, f"known: {', '.join(sorted(FIELDS))}", field=unknown[0])
    name, options = form.get("name", ""), form.get("options", "{}")
    if not isinstance(name, str) or not isinstance(options, str):
        raise Problem("invalid-request", "'name' and 'options' are text fields", "only 'files' holds files")
    files: dict[str, bytes] = {}
    for part in form.getlist("files"):
        if not isinstance(part, UploadFile) or not part.filename:
            raise Problem(
                "invalid-request", "'files' holds files with names", "see 'curl -F files=@...'", field="files"
            )
        if part.filename in files:
            raise Problem("duplicate-file", f"{part.filename} was uploaded twice", "send each once", field="files")
        files[part.filename] = await part.read()
    if not files:
        raise Problem("invalid-request", "no file was uploaded", "send them as form field 'files'", field="files")
    chosen = options_of(parse_json(options.encode(), "options"))
    # A single file speaks for itself: an archive by its content, else the configuration, whatever its name.
    source = next(iter(files.values())) if len(files) == 1 and not _is_code(files) else files
    return await run_in_threadpool(prepare, source, name[:NAME_LENGTH] or None, chosen)


def _is_code(files: dict[str, bytes]) -> bool:
    return all(name.endswith(".py") for name in files)
