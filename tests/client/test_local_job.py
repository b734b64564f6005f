"""Local jobs of the Python API: progress, preemption, suspension, failure, and the end with the program."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import bamboo
from bamboo.local.scratch import collect
from bamboo_trainer.models import mlp
from cluster.children import marked
from waiting import PATIENCE, until

TRAINING: Any = {"steps": 40, "globalBatchSize": 16, "microBatchSize": 4}
SPLIT: Any = {"stages": 2, "split": [4, 4]}  # or each job would count what its layers cost, in a third of a second
ENDLESS: Any = {**TRAINING, "steps": 1_000_000}
OWN_TASK = """\
from bamboo_trainer.models import mlp


def build(config):
    if config:
        raise ValueError("my own mistake")
    return mlp.build(config)
"""
SCRIPT = """\
import bamboo


def build(config):
    from bamboo_trainer.models import mlp  # the program itself needs no torch

    return mlp.build(config)


if __name__ == "__main__":
    training = {"steps": 1_000_000, "globalBatchSize": 16, "microBatchSize": 4}
    handle = bamboo.Job("script", task=build, training=training, topology={"stages": 2}).run(page=False)
    for event in handle.events(follow=True):
        print(event.reason, flush=True)
"""


def job(training: Any = TRAINING, **parts: Any) -> bamboo.Job:
    return bamboo.Job("here", task=mlp.build, training=training, **{"topology": SPLIT, **parts})


def trains(handle: bamboo.JobHandle, step: int = 3) -> None:
    until(lambda: handle.progress.step >= step)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a task's module from a user's folder, and unload it after the test."""
    (tmp_path / "own_task_of_a_user.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    import own_task_of_a_user  # type: ignore[import-not-found]

    yield own_task_of_a_user
    del sys.modules["own_task_of_a_user"]


def test_a_run_with_a_loss_is_followed_to_its_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calm, disturbed = job().run(), job(standby={"workers": 1}).run(preempt="at:20:0")
    assert [one.watch().state for one in (calm, disturbed)] == ["Complete", "Complete"]
    shown = capsys.readouterr().out
    assert "! WorkerLost: w" in shown
    assert "here: Complete, step 40/40, loss " in shown
    progress = disturbed.progress
    assert (progress.step, progress.preemptions, progress.lost_samples) == (40, 1, 0)
    assert [event.reason for event in disturbed.events()].count("WorkerLost") == 1
    weights, others = calm.weights(), disturbed.weights()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights), "the same bits"
    history = disturbed.history()
    assert [step for step, _ in history.losses()] == list(range(1, 41))
    assert {row["kind"] for row in history} == {"step", "event"}
    with safe_open(disturbed.export(tmp_path / "all.safetensors"), "pt") as exported:
        assert set(exported.keys()) == weights.keys()
    with pytest.raises(bamboo.BambooError, match=r"^/.*all.safetensors exists; force replaces it"):
        disturbed.export(tmp_path / "all.safetensors")
    html = disturbed._repr_html_()
    assert "Complete" in html
    assert "<polyline" in html
    for one in (calm, disturbed):
        one.close()


@pytest.mark.slow
def test_a_task_of_the_users_own_file_fails_with_its_line(own_module: Any) -> None:
    parts: Any = {"training": TRAINING, "topology": SPLIT}
    with bamboo.Job("own", task=own_module.build, **parts).run(page=False) as sound:
        assert sound.wait(PATIENCE).state == "Complete"
    broken = bamboo.Job("own", task=own_module.build, config={"x": 1}, **parts)
    with broken.run(page=False) as handle, pytest.raises(bamboo.JobFailed) as told:
        handle.wait(PATIENCE)
    assert told.value.reason == "TaskFailed"
    assert "my own mistake (" in str(told.value)
    assert "own_task_of_a_user.py line 6, in build)" in str(told.value)
    with pytest.raises(bamboo.BambooError, match="my own mistake"):
        broken.validate(load=True)


def test_a_job_is_suspended_resumed_and_stopped(tmp_path: Path) -> None:
    handle = job(ENDLESS, checkpoint={"storage": tmp_path.as_uri()}).run()
    assert handle.progress.state == "Starting"
    with pytest.raises(bamboo.InvalidRequest, match="does not train yet"):
        handle.preempt()
    trains(handle)
    with pytest.raises(bamboo.InvalidRequest, match=r"worker 'nope': expected one of w0, w1"):
        handle.preempt("nope")
    assert handle.progress.page.startswith("http://127.0.0.1:")
    with pytest.raises(bamboo.NotInTime):
        handle.wait(0.1)
    handle.preempt(notice=True)
    until(lambda: handle.progress.preemptions == 1)
    handle.suspend()
    kept = handle.checkpoints()[0].step
    assert handle.progress.message == f"the state of step {kept} is kept"
    assert (handle.progress.state, handle.progress.step >= kept) == ("Suspended", True)
    with pytest.raises(bamboo.InvalidRequest, match=r"suspended; resume\(\)"):
        handle.wait()
    handle.resume()
    trains(handle, kept + 3)
    assert handle.progress.preemptions == 1, "they are counted on"
    handle.stop()
    with pytest.raises(bamboo.JobInterrupted):
        handle.wait()
    handle.close()
    for ask in (handle.preempt, lambda: handle.preempt("w0")):
        with pytest.raises(bamboo.InvalidRequest, match=r"does not run \(Interrupted\)"):
            ask()


def test_a_job_without_checkpoints_is_not_suspended() -> None:
    with job(ENDLESS).run(page=False) as handle:
        with pytest.raises(bamboo.InvalidRequest, match="keeps no checkpoints"):
            handle.suspend()
        with pytest.raises(bamboo.InvalidRequest, match="keeps no checkpoints"):
            handle.checkpoints()
        with pytest.raises(bamboo.InvalidRequest, match=r"no weights .* until close\(\)"):
            handle.weights()


@pytest.mark.slow
def test_more_workers_are_asked_for_while_it_trains() -> None:
    refused = pytest.raises(bamboo.InvalidRequest, match=r"without spec\.elastic its grid is fixed")
    with job(ENDLESS).run(page=False) as handle, refused:
        handle.scale(4)
    elastic = {"maxWorkers": 2, "stabilizationSeconds": 1}
    with job(ENDLESS, topology={"stages": 2}, elastic=elastic).run(page=False) as handle:
        trains(handle)
        handle.scale(4)
        until(lambda: sum(event.reason == "WorkerJoined" for event in handle.events()) == 4)
        with pytest.raises(bamboo.InvalidRequest, match=r"workers: spec.elastic.maxWorkers: expected an integer"):
            handle.scale(0)


def test_a_program_with_a_running_loop_waits_in_it_or_in_a_thread() -> None:

    async def cell() -> tuple[str, list[str]]:
        handle = job().run(page=False)  # waits, though this thread has a running loop
        assert handle.progress.state in ("Starting", "Running")
        ended = await asyncio.to_thread(handle.wait, PATIENCE)
        return ended.state, [event.reason for event in handle.events(follow=True)]

    state, reasons = asyncio.run(cell())
    assert state == "Complete"
    assert reasons[-1] == "Complete"
    assert "task: 8 layers" in asyncio.run(_validated())


async def _validated() -> str:
    return job().validate(load=True).told[0]


def test_ctrl_c_ends_the_job_and_not_the_program() -> None:
    handle = job(ENDLESS).run(page=False)
    trains(handle)

    def press() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)

    def wait() -> None:
        presses.start()
        handle.wait(PATIENCE)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGINT, before)
    presses.join()
    assert handle.progress.state == "Interrupted"
    handle.close()


@pytest.mark.slow
def test_a_script_that_is_run_as_a_module_uses_its_own_function(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "steps.py").write_text("STEPS = 5\n")
    own = SCRIPT.replace("import bamboo\n", "import bamboo\nfrom .steps import STEPS\n", 1)
    own = own.replace("1_000_000", "STEPS").partition("    for event")[0] + "    print(handle.wait(100).state)\n"
    (package / "train.py").write_text(own)
    done = subprocess.run(
        [sys.executable, "-m", "mine.train"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "Complete\n", done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("cold_processes")  # whose environment has the mark
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_program(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    script = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "MARK_OF_THIS_TEST": str(tmp_path)},
    )
    assert script.stdout is not None
    for line in script.stdout:
        if line == "Started\n":
            break
    mark = f"MARK_OF_THIS_TEST={tmp_path}"
    assert len(marked(mark)) > 3
    script.send_signal(how)
    script.wait(PATIENCE)
    script.stdout.close()
    until(lambda: not marked(mark))
    collect(tmp_path / "tmp")  # as the next run does, after a program that was killed
    assert not list((tmp_path / "tmp").iterdir())


def test_a_job_begins_with_the_weights_that_another_run_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part = {"entrypoint": "bamboo_trainer.models.mlp:build", "initialFrom": {"url": str(tmp_path / "first/weights")}}
    later = bamboo.Job("next", task=part, training=TRAINING, topology=SPLIT)
    first = job().run(output="first")
    first.wait()
    with later.run(preempt="at:5") as following:
        assert following.watch().state == "Complete"
        (told,) = [event.message for event in following.events() if event.reason == "InitialWeights"]
        assert f"taken from {tmp_path}/first/weights: " in told
        begun, (_, last) = following.history().losses()[0][1], first.history().losses()[-1]
        assert abs(begun - last) < abs(begun - first.history().losses()[0][1]), "it goes on where the other ended"
    first.close()
