"""Checkpoints on an S3 server on the loopback interface, written and read by the real client."""

import logging
from datetime import UTC, datetime

import pytest

from bamboo_core.checkpoint.selection import removable
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.bounded import StorageError, StoreLimits, StoreUnavailable
from checkpoint_kit import layer_bytes, save

LIMITS = StoreLimits(tries=2, pause=0.0)
SECRET = "hunter2hunter2"


@pytest.fixture(scope="module")
def endpoint():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(endpoint, monkeypatch, tmp_path):
    """Yield a boto3 client of a server with one empty bucket, without this machine's AWS settings."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": str(tmp_path / "no"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no"),
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    for found in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=found["Key"])
    client.delete_bucket(Bucket="bucket")
    client.close()


def keys(client):
    return [found["Key"] for found in client.list_objects_v2(Bucket="bucket").get("Contents", [])]


def test_a_checkpoint_goes_to_s3_and_back(client):
    store = CheckpointStore("s3://bucket/run/1", LIMITS)
    assert store.list() == ()
    store.probe()
    assert keys(client) == []
    manifests = [save(store, step) for step in (20, 40, 60)]
    found = store.list()
    assert [one.manifest for one in found] == manifests[::-1]
    assert all(abs(datetime.now(UTC).timestamp() - one.modified) < 3600 for one in found)
    assert CheckpointStore("s3a://bucket/run/1/", LIMITS).list() == found
    assert [store.read_part(manifests[0], layer) for layer in range(2)] == [
        layer_bytes(20, layer) for layer in range(2)
    ]
    assert store.read_start(manifests[0], 0, 6) == b"step 2"
    assert CheckpointStore("s3://bucket/run", LIMITS).list() == ()
    for attempt in removable(found, 1, now=0.0):
        store.delete(attempt)
        store.delete(attempt)
    assert [one.manifest for one in store.list()] == manifests[2:]
    assert keys(client) == sorted(
        f"run/1/{manifests[2].place.folder}/{name}"
        for name in ("layer-00000.safetensors", "layer-00001.safetensors", "manifest.json")
    )


def test_what_s3_refuses_is_told_in_a_sentence_without_the_secret(client, monkeypatch, endpoint):
    nowhere = CheckpointStore("s3://nobucket/run", LIMITS)
    for act in (nowhere.list, nowhere.probe, lambda: save(nowhere, 1)):
        with pytest.raises(StoreUnavailable, match=r"^cannot .* s3://nobucket/run.*: it is not there .*bucket"):
            act()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    gone = CheckpointStore("s3://bucket/run", StoreLimits(tries=1))
    with pytest.raises(StorageError, match=r"^cannot list s3://bucket/run: .*127.0.0.1:9") as caught:
        gone.list()
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StorageError, match="NoCredentialsError: Unable to locate credentials"):
        CheckpointStore("s3://bucket/run", StoreLimits(tries=1)).list()
