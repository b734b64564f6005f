"""What is said of a store's failures never shows a credential."""

import pytest

from bamboo_core.storage.failures import explain
from bamboo_core.storage.url import without_secrets


@pytest.mark.parametrize(
    "text",
    [
        "GET https://b.s3.amazonaws.com/run?X-Amz-Credential=hunter22&X-Amz-Signature=hunter22 failed",
        "https://account.blob.core.windows.net/c/r?sv=2024&sig=hunter22",
        "s3://key:hunter22@bucket/run is not there",
        "AccountName=a;AccountKey=hunter22;EndpointSuffix=core.windows.net",
        "{'Authorization': 'Bearer hunter22'}",
        "x-amz-security-token: hunter22",
        "password = hunter22",
        "the value hunter22 of the environment",
    ],
)
def test_no_text_shows_a_secret(text, monkeypatch):
    if text.startswith("the value"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter22")
    assert "hunter22" not in without_secrets(text)
    assert "hunter22" not in explain(RuntimeError(text)).reason
    assert "hunter22" not in explain(OSError(text)).reason
