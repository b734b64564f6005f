"""The operator's calls to the API server for a job: retries, logged failures, and events about refusals."""

from types import SimpleNamespace

import pytest

from bamboo_core.coordinator.events import Emit
from bamboo_core.kube.errors import ApiError, ClusterUnreachable
from bamboo_operator.kube import attempts as module
from bamboo_operator.kube.attempts import ApiAttempts, PodRefused

BUSY, GONE = ApiError(429, "Busy", "later"), ApiError(404, "NotFound", "gone")


class Server:
    """An API server whose calls raise the given errors in turn, and then succeed."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def call(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY", 0.0)


async def test_a_call_is_tried_until_it_is_done_and_each_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(BUSY, ClusterUnreachable("late"), ClusterUnreachable("away"))
    assert await ApiAttempts(("team", "tiny")).until_done("delete a pod", server.call) is None
    assert server.calls == 4
    assert len(caplog.records) == 3
    assert all(record.getMessage().startswith("team/tiny: cannot delete a pod: ") for record in caplog.records)


@pytest.mark.parametrize(("error", "ends", "calls"), [(GONE, (404,), 1), (GONE, (403,), 2), (BUSY, (404,), 2)])
async def test_an_answer_that_is_the_end_of_it_is_returned(error: ApiError, ends: tuple[int], calls: int) -> None:
    server = Server(error)
    ended = await ApiAttempts(("team", "tiny")).until_done("read", server.call, ends)
    assert (server.calls, ended) == (calls, error if calls == 1 else None)


async def test_a_failure_that_goes_on_is_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that repeats, such as a quota's refusal every 15 s, is logged again after ten minutes or a success."""
    now, attempts, refused = 1000.0, ApiAttempts(("team", "tiny")), ApiError(403, "Forbidden", "exceeded quota")
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    async def fails(what: str = "make pods", error: Exception = refused) -> int:
        caplog.clear()
        assert not await attempts.once(what, Server(error).call(), lambda emit: None)
        return len(caplog.records)

    assert [await fails() for _ in range(5)] == [1, 0, 0, 0, 0]
    assert (await fails("post events"), await fails(error=BUSY), await fails(error=BUSY)) == (1, 1, 0)
    now += module.LOG_AGAIN_SECONDS
    assert [await fails(error=BUSY) for _ in range(2)] == [1, 0]
    assert await attempts.once("make pods", Server().call(), lambda emit: None)
    assert [await fails(error=BUSY) for _ in range(2)] == [1, 0], "it has worked in between"


async def test_a_refusal_is_told_once_and_another_one_again() -> None:
    attempts, told = ApiAttempts(("team", "tiny")), list[Emit]()
    forbidden, invalid = ApiError(403, "Forbidden", "no"), ApiError(422, "Invalid", "not so")
    for error in (
        forbidden,
        BUSY,
        forbidden,
        PodRefused(403, "Forbidden", "no pod"),
        invalid,
        ClusterUnreachable("late"),
        forbidden,
    ):
        assert not await attempts.once("write", Server(error).call(), told.append)
    assert [(emit.reason, emit.message) for emit in told] == [
        ("ClusterRefuses", str(forbidden)),
        ("ClusterRefuses", str(invalid)),
    ]
