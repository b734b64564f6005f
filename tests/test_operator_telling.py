"""What is written to a job's status although the API server's answers are lost."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bamboo_operator.telling import Telling
from operator_kit import job


class Api:
    """Keeps the status, and answers or not."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.answers, self.writes = True, 0

    async def write_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> None:
        self.writes += 1
        self.status = {key: value for key, value in {**self.status, **status}.items() if value is not None}
        if not self.answers:
            raise TimeoutError


async def test_a_field_whose_write_was_not_answered_is_removed_too() -> None:
    """Another operator would take the plan for that of workers that train."""
    api, telling = Api(), Telling(("team", "tiny"), "uid", "selector", {})
    telling.note(spec=job())
    await telling.write(api, None)  # type: ignore[arg-type]
    telling.note(plan='{"epoch":1}')
    api.answers = False
    with pytest.raises(TimeoutError):
        await telling.write(api, None)  # type: ignore[arg-type]
    assert api.status["plan"] == '{"epoch":1}'
    api.answers = True
    telling.note(spec=replace(job(), suspend=True), plan=None)
    await telling.write(api, None)  # type: ignore[arg-type]
    assert "plan" not in api.status


async def test_what_may_have_been_written_is_written_over_though_nothing_has_changed_since() -> None:
    api, telling = Api(), Telling(("team", "tiny"), "uid", "selector", {})
    telling.note(spec=job())
    await telling.write(api, None)  # type: ignore[arg-type]
    before = dict(api.status)
    telling.note(plan='{"epoch":1}')
    api.answers = False
    with pytest.raises(TimeoutError):
        await telling.write(api, None)  # type: ignore[arg-type]
    api.answers = True
    telling.note(plan=None)
    await telling.write(api, None)  # type: ignore[arg-type]
    assert api.status == before
    writes = api.writes
    await telling.write(api, None)  # type: ignore[arg-type]
    assert api.writes == writes, "once is enough"
