"""Whether Workloads of Kueue are followed."""

from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster import workload_kind
from bamboo_operator.cluster.workload_kind import WorkloadKind

FORBIDDEN = ApiError(403, "Forbidden", "you may not list them")


class Server:
    """Serves Workloads, and answers each time that they are listed with the next of these."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def workload_version(self) -> str:
        return "v1beta2"

    async def list_workloads(self, version: str, namespace: str, selector: str) -> list[Any]:
        self.asked.append((version, namespace))
        if (error := self._answers.pop(0)) is not None:
            raise error
        return []


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(workload_kind, "asyncio", SimpleNamespace(sleep=sleep))


async def test_workloads_that_an_older_charts_rights_do_not_know_are_not_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """kopf would begin with no job before it has listed them. Once they may be listed they are followed."""
    server = Server(FORBIDDEN, FORBIDDEN, None)
    kind = WorkloadKind(server, "team")  # type: ignore[arg-type]
    assert await kind.version() is None
    assert server.asked == [("v1beta2", "team")]
    await kind.until_served()
    assert len(server.asked) == 3
    assert caplog.messages == ["no Workload of Kueue is followed: you may not list them"]


async def test_what_may_pass_is_tried_again() -> None:
    server = Server(TimeoutError(), ApiError(500, "InternalError", ""), None)
    assert await WorkloadKind(server).version() == "v1beta2"  # type: ignore[arg-type]
