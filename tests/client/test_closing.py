"""Failures after the last step of a local job. Only a failure to write the weights fails the job."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bamboo.local import closing, runner
from bamboo.local.closing import Closing
from bamboo.local.run_options import ReportOptions
from bamboo.local.runner import RunOptions
from bamboo.local.session import train
from bamboo.terminal.live_view import LiveView
from manifest_kit import bamboojob, training
from run_view_kit import source

LONG = 600.0
TINY = bamboojob(
    "tiny",
    task={"entrypoint": "bamboo_trainer.models.mlp:build"},
    training=training(3, 4, 2),
    topology={"stages": 2, "split": [4, 4]},
)


async def test_who_cancels_is_not_held_up() -> None:
    ending = Closing()
    waiting = asyncio.create_task(ending.wait("while one waited", asyncio.sleep(LONG)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def then_fails(work: Coroutine[Any, Any, Any]) -> None:
    await work
    raise ProcessLookupError  # it has no text


async def then_hangs(work: Coroutine[Any, Any, Any]) -> None:
    await work
    await asyncio.sleep(LONG)


def test_weights_that_cannot_be_written_fail_the_job_and_its_last_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "EXPORT", "bamboo_trainer.checkpoint.export:of_another_version")
    output = tmp_path / "out"
    code = train(source(TINY), RunOptions(output=output), ReportOptions())
    out, err = capfd.readouterr()
    assert code == 1, out + err
    assert "SaveFailed" in out + err
    assert f"the checkpoint is in {(output / 'last-state').as_uri()}" in out + err
    (kept,) = (output / "last-state").iterdir()
    assert (kept / "manifest.json").exists()
    assert not (output / "weights").exists()


@pytest.mark.parametrize(("disturbed", "what"), [(then_fails, "ProcessLookupError"), (then_hangs, "no end within")])
def test_a_complete_job_stays_complete_whatever_happens_while_it_closes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    disturbed: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, None]],
    what: str,
) -> None:
    """In one run, every wait after the last step fails or hangs once its work is done."""
    if disturbed is then_hangs:
        monkeypatch.setattr(closing.Closing.wait, "__defaults__", (2.0,))
        monkeypatch.setattr(runner, "LOGGER_SECONDS", 1.0)
    wait = closing.Closing.wait

    async def wait_disturbed(ending: Closing, doing: str, work: Coroutine[Any, Any, Any], *seconds: float) -> Any:
        return await wait(ending, doing, disturbed(work), *seconds)

    monkeypatch.setattr(closing.Closing, "wait", wait_disturbed)

    def stop(view: LiveView) -> None:
        raise OSError

    monkeypatch.setattr(LiveView, "stop", stop)
    output = tmp_path / "out"
    code = train(source(TINY), RunOptions(output=output), ReportOptions())
    out, err = capfd.readouterr()
    assert (code, "complete" in out.lower()) == (0, True), out + err
    assert {file.name for file in output.iterdir()} >= {"weights", "history.jsonl", "page.html"}
    assert [json.loads(line).get("step") for line in (output / "history.jsonl").read_text().splitlines()].count(2) == 1
    for doing in (
        "while the workers left",
        "while the workers' processes were ended",
        "while the workers' connections were closed",
        "while the page's port was closed",
    ):
        assert f"bamboo: {doing}: {what}" in err
    assert "bamboo: while the view was closed: OSError; how the job ended does not depend on it" in err
