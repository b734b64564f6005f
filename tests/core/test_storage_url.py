"""URLs of checkpoint stores: valid ones, refused ones, and messages without credentials."""

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.spec import CLAIM
from bamboo_core.job.text_patterns import STORAGE
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.url import parse_url, shown_url
from manifest_kit import minimal


@pytest.mark.parametrize(
    ("url", "protocol", "path", "shown"),
    [
        ("/data/run", "file", "/data/run", "/data/run"),
        ("/data/what?#", "file", "/data/what?#", "/data/what?#"),
        ("run/1", "file", os.path.abspath("run/1"), os.path.abspath("run/1")),
        ("file:///data/run/", "file", "/data/run", "/data/run"),
        ("file://localhost/data", "file", "/data", "/data"),
        ("file:///my%20data/100%25", "file", "/my data/100%", "/my data/100%"),
        ("s3://bucket/run/", "s3", "s3://bucket/run", "s3://bucket/run"),
        ("S3A://bucket/run", "s3", "s3://bucket/run", "S3A://bucket/run"),
        ("gcs://bucket", "gs", "gs://bucket", "gcs://bucket"),
        ("az://container/run", "az", "az://container/run", "az://container/run"),
        (
            "abfss://c@a.dfs.core.windows.net/r",
            "abfs",
            "abfs://c@a.dfs.core.windows.net/r",
            "abfss://c@a.dfs.core.windows.net/r",
        ),
        ("memory://run", "memory", "memory://run", "memory://run"),
    ],
)
def test_a_url_says_where(url, protocol, path, shown):
    parsed = parse_url(url)
    assert (parsed.protocol, parsed.path, parsed.shown) == (protocol, path, shown)


REFUSED = [
    "",
    "a\nb",
    "ftp://host/x",
    "https://host/x",
    "file://host/x",
    "file:///",
    "s3://",
    "s3:///run",
    "s3://key:hunter22@bucket/run",
    "s3://hunter22@bucket/run",
    "s3://bucket/run?sig=hunter22",
    "s3://bucket/run#hunter22",
    "az://c/r?sv=2024&sig=hunter22",
    "abfs://user:hunter22@a.dfs.core.windows.net/r",
    "https://user:hunter22@host/x?token=hunter22",
    "s3://[hunter22@x/",
    "s3://key:hunter22@bucket/run\n",
    "s3\x01://key:hunter22@bucket/run",
]


@pytest.mark.parametrize("url", REFUSED)
def test_another_url_is_refused_without_its_secrets(url):
    with pytest.raises(StorageError, match=r"checkpoint URL .*expected") as caught:
        CheckpointStore(url)
    assert "hunter22" not in str(caught.value)
    assert "hunter22" not in shown_url(url)


def keeping(url: str) -> dict[str, Any]:
    document = minimal()
    document["spec"]["checkpoint"] = {"storage": url}
    return document


@pytest.mark.parametrize("url", [*REFUSED, "S3://bucket/run", "pvc://", "/run", "s3://b c"])
def test_a_manifest_with_a_url_that_no_store_has_is_refused_without_showing_a_secret(url: str) -> None:
    """The parser of manifests refuses a storage URL that manifests must not have, and its message shows no secret."""
    with pytest.raises(ManifestError) as caught:
        parse_manifest(keeping(url))
    (problem,) = caught.value.problems
    assert problem.path == "spec.checkpoint.storage"
    assert "without credentials" in problem.message
    assert "hunter22" not in problem.message
    assert "..." in problem.message or not STORAGE.fits(problem.message.rpartition(" got ")[2].strip('"'))


@given(st.from_regex(STORAGE.pattern, fullmatch=True).filter(lambda url: not url.startswith(CLAIM)))
def test_whatever_fits_a_manifest_can_be_opened(url: str) -> None:
    assert parse_url(url).shown
