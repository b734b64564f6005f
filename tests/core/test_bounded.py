"""Calls to a store: time limits, retries, and error messages without secrets."""

import threading
import time
from contextlib import suppress

import pytest

from bamboo_core.storage.bounded import MOST_HANGING, BoundedCalls, StoreLimits, StoreUnavailable, explain
from bamboo_core.storage.url import without_secrets
from checkpoint_kit import FaultyFileSystem, faulty_store, save, states


def test_a_store_that_hangs_is_left_after_a_while():
    filesystem = FaultyFileSystem(lambda number, operation: "hangs")
    store = faulty_store(filesystem, StoreLimits(seconds=0.05, tries=2, pause=0.0))
    for _ in range(MOST_HANGING // 2):
        with pytest.raises(StoreUnavailable, match=r"cannot list .*: the store did not answer in time .*tried 2 times"):
            store.list()
    with pytest.raises(StoreUnavailable, match=f": {MOST_HANGING} calls to the store have not returned"):
        store.list()
    assert len(filesystem.operations) == MOST_HANGING  # nothing more is started
    filesystem.faults = {}
    filesystem.answer.set()
    for thread in threading.enumerate():
        if thread.name == "store":
            thread.join(60)
    patient = faulty_store(filesystem)
    save(patient, 20)
    for _ in range(100):  # it has very little time to answer in
        with suppress(StoreUnavailable):
            assert states(store) == [(20, "Complete")]
            return
    raise AssertionError("its calls are never given up")


def test_a_call_that_returns_leaves_no_thread():
    """A call's thread ends before the call returns, even if removing thread-local objects takes a while."""
    kept = threading.local()

    class Slow:
        def __del__(self):
            time.sleep(0.2)

    def function():
        kept.slow = Slow()  # removed when the thread ends, after the function has returned
        return threading.current_thread()

    thread = BoundedCalls(StoreLimits()).call("cannot do it", function)
    assert not thread.is_alive()


def test_more_time_is_given_for_more_bytes_and_pauses_grow():
    limits = StoreLimits(seconds=10.0, slowest=100.0, tries=4, pause=0.5)
    assert (limits.of(0), limits.of(500)) == (10.0, 15.0)
    pauses, calls = [], []

    def fail():
        calls.append(1)
        raise ConnectionError("no")

    with pytest.raises(StoreUnavailable, match="tried 4 times"):
        BoundedCalls(limits, pauses.append).call("cannot do it", fail)
    assert pauses == [0.5, 1.0, 2.0]
    assert len(calls) == 4


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
