"""The artifact store on a real S3-compatible server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from onboarding.artifacts import ArtifactStore


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="artifacts")
    client.close()
    yield "s3://artifacts/onboard"
    server.stop()


def test_stored_content_comes_back_by_its_digest(bucket: str) -> None:
    store = ArtifactStore(bucket)
    ref = store.put(b"content", name="a.txt", media_type="text/plain")
    assert ref.digest == hashlib.sha256(b"content").hexdigest()
    assert store.put(b"content", name="b.txt", media_type="text/plain").digest == ref.digest
    assert ArtifactStore(bucket).get(ref.digest) == b"content"
    assert store.has(ref.digest)
    assert not store.has("0" * 64)
    with pytest.raises(FileNotFoundError):
        store.get("0" * 64)
