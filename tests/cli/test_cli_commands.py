"""The command line: messages about wrong arguments, and the files and processes of whole runs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app

MANIFEST = """
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: small}
spec:
  task: {entrypoint: "no_such_module:build"}
  training: {steps: 3, globalBatchSize: 4, microBatchSize: 2}
  topology: {stages: 2}
"""

SPIRALS = (
    MANIFEST.replace('"no_such_module:build"', "bamboo_trainer.models.mlp:build")
    .replace("steps: 3", "steps: 600, maxGradientNorm: 1.0")
    .replace("stages: 2", "stages: 2, split: [4, 4]")
)
EXITING = """
import sys
import torch
from torch import nn
from bamboo_trainer.task import Task


class Data:
    def __len__(self):
        return 8

    def batch(self, indices):
        if len(indices) == 1:  # workers compare their data before they train
            return (torch.zeros(1, 2),), (torch.zeros(1),)
        print("batch for", indices)
        print("without an end", end="")
        sys.exit(9)


def build(config):
    layers = [lambda: nn.Linear(2, 2)] * 2
    return Task(
        layers=layers, dataset=Data(), loss=lambda a, b: a[0].mean(), learning_rate=lambda step: 0.1,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named]), costs=[1, 1],
    )
"""
BAMBOO = [sys.executable, "-c", "from bamboo.cli.commands import main; main()"]


def write(folder: Path, text: str = MANIFEST) -> str:
    job = folder / "job.yaml"
    job.write_text(text)
    return str(job)


def bamboo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BAMBOO, *arguments], capture_output=True, text=True, timeout=250, cwd=folder)


def processes_with(setting: str) -> list[str]:
    """Return the command lines of all processes that have the setting, NAME=VALUE, in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["validate", "JOB"], 0, "small is valid: 1 x 2 workers and 0 standby, 3 steps"),
        (["--version"], 0, "."),
        (["dance"], 2, "No such command 'dance'"),
        (["validate", "/no/such.yaml"], 2, "bamboo: /no/such.yaml: no such file"),
        (["run", "JOB", "--preempt", "soon"], 2, "--preempt soon: expected none"),
        (["run", "JOB", "--preempt", "at:1:5"], 2, "the job has stages 0 to 1"),
        (["run", "JOB", "--workers", "3"], 2, "expected a multiple of the job's 2 stages"),
        (["run", "JOB", "--workers-per-node", "65"], 2, "less than or equal to 64"),
        (["run", "JOB", "--workers", "8"], 2, "--workers 8: spec.topology.pipelines: expected at most"),
        (["run", "SUSPENDED"], 2, "spec.suspend: the job is suspended; set it to false"),
        (["run", "ALONE", "--checkpoints", "/proc/no/store"], 2, "nothing else could save this job: cannot write"),
        (["run", "JOB", "--checkpoints", "ALONE"], 2, "alone.yaml is a file, expected a folder"),
        (["run", "BELOW"], 2, "spec.checkpoint.storage: /proc/self/status is a file, expected a folder"),
        (["run", "JOB", "--output", "FULL"], 2, "it holds the weights of another run"),
        (["run", "JOB", "--heartbeat-timeout", "inf"], 2, "expected a number of seconds"),
        (
            ["run", "JOB", "--trace", "/no/such/file"],
            2,
            "--trace: cannot write /no/such/file: there is no folder /no/such",
        ),
        (["run", "JOB", "--heartbeat-timeout", "0"], 2, "1.5"),
        (["run", "JOB", "--no-page", "--page-port", "80"], 2, "--page-port and --no-page: expected at most one"),
        (["profile", "JOB", "--output", "no/p.json"], 2, "--output: cannot write no/p.json: there is no folder no\n"),
        (["history", "/no/such"], 2, "/no/such: there is nothing; expected the name of a job on the cluster, a manif"),
    ],
)
def test_the_command_line_says_what_is_wrong(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    suspended = tmp_path / "suspended.yaml"
    suspended.write_text(f"{MANIFEST}  suspend: true\n")
    alone = tmp_path / "alone.yaml"
    alone.write_text(f"{MANIFEST}  redundancy: {{mode: None}}\n")
    below = tmp_path / "below.yaml"
    below.write_text(f"{MANIFEST}  checkpoint: {{storage: 'file:///proc/self/status/store'}}\n")
    names = {"JOB": write(tmp_path), "FULL": str(tmp_path)}
    names |= {"SUSPENDED": str(suspended), "ALONE": str(alone), "BELOW": str(below)}
    result = CliRunner().invoke(app, [names.get(a, a) for a in arguments])
    assert (result.exit_code, "Traceback" in result.output) == (code, False)
    assert said in result.output


FICKLE = """
import random
from dataclasses import replace
from torch import nn
from bamboo_trainer.models import mlp


class Skips(nn.Module):
    def forward(self, x):
        return x if random.random() < 0.1 else x * 2


def build(config):
    task = mlp.build(config)
    return replace(task, layers=[*task.layers, Skips])
"""


def test_a_task_that_is_not_deterministic_fails_by_name_in_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "fickle.py").write_text(FICKLE)
    done = bamboo(tmp_path, "run", write(tmp_path, MANIFEST.replace("no_such_module", "fickle")), "--json")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["outcome"], summary["reason"]) == (1, "Failed", "NotDeterministic")
    assert "(Skips) is not deterministic: it draws from Python's random" in summary["message"]
    assert summary["committed"] <= 1
    assert summary["log_tail"] is None


def exited(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a job with --debug whose dataset calls sys.exit. Its first failure ends it (backoffLimit 0)."""
    (folder / "exiting.py").write_text(EXITING)
    job = write(folder, MANIFEST.replace("no_such_module", "exiting") + "  backoffLimit: 0\n")
    return bamboo(folder, "run", job, "--no-page", "--debug", "--output", str(folder / "out"))


def test_a_task_that_ends_its_worker_is_judged_by_its_exit_code_and_found_in_the_log(tmp_path: Path) -> None:
    done = exited(tmp_path)
    log = (tmp_path / "out" / "workers.log").read_text()
    assert done.returncode == 1
    assert re.search(r"small: Failed, BackoffLimitExceeded\. a worker failed .*; w\d exited with code 9", done.stdout)
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d w\d step 0 \| batch for \(\d+, \d+\)$", log, re.MULTILINE)
    assert re.search(r"^\d{4}-.* w\d step 0 \| without an end$", log, re.MULTILINE)
    assert re.search(r"ERROR w\d step 0 .*: ended by sys\.exit with code 9 \(exiting\.py line 17, in batch\)", log)
    assert 'exiting.py", line 17, in batch\n    sys.exit(9)\n' in log
    assert log in done.stderr
    assert not (tmp_path / "out" / "weights").exists()


@pytest.mark.parametrize(
    ("seen", "said", "number"),
    [
        (["starting workers"], True, signal.SIGINT),
        (["step 1/"], True, signal.SIGTERM),
        # between two runs there is no job to speak of
        pytest.param(["the same job again"], False, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(["the same job again", "step 1/"], True, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_everything_at_once(tmp_path: Path, seen: list[str], said: bool, number: signal.Signals) -> None:
    """A signal at the start, in training, between --verify's two runs, or in the second leaves no process or file."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    setting = f"TMPDIR={scratch}"
    # If the signal comes before a second run trains, the first one may be short.
    manifest = SPIRALS.replace("steps: 600", "steps: 10") if seen == ["the same job again"] else SPIRALS
    command = ["env", setting, *BAMBOO, "run", write(tmp_path, manifest), "--verify"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for start in seen:
            while start not in (line := job.stdout.readline()):
                assert line, "the run ended early"
        job.send_signal(number)
        sent = time.monotonic()
        rest = job.stdout.read()
    assert time.monotonic() - sent < 15
    assert (job.returncode, "Traceback" in rest) == (130, False), rest
    assert "Interrupted" in rest or not said
    assert list(scratch.iterdir()) == []
    assert processes_with(setting) == []


def test_ctrl_c_keeps_the_state_and_the_same_command_goes_on_with_it(tmp_path: Path) -> None:
    """At Ctrl-C the first run saves its state; the second goes on from there, and ends when Ctrl-C is pressed twice."""
    setting = f"TMPDIR={tmp_path}/tmp"
    (tmp_path / "tmp").mkdir()
    checkpoint = f"checkpoint: {{storage: 'file://{tmp_path}/store', everySteps: 1000000}}"
    job = write(tmp_path, SPIRALS.replace("steps: 600", "steps: 1000000") + f"  {checkpoint}\n")
    kept = 0
    for presses in (1, 2):
        with subprocess.Popen(
            ["env", setting, *BAMBOO, "run", job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            assert run.stdout is not None
            step = None
            while step is None or int(step[1]) < 20:
                line = run.stdout.readline()
                assert line, "the run ended early"
                step = re.search(r"Running, step (\d+)/", line) or step
                assert step is None or int(step[1]) >= kept
            said = ""
            for _ in range(presses):
                run.send_signal(signal.SIGINT)
                while "the state is kept first" not in said:
                    said += (line := run.stdout.readline())
                    assert line, said
            said += run.stdout.read()
        assert (run.returncode, "Traceback" in said) == (130, False), said
        if presses == 1:
            saved = re.search(r"CheckpointSaved: the state of step (\d+) is saved", said)
            assert saved, said
            kept = int(saved[1])
            assert kept >= int(step[1])
            assert max(map(int, re.findall(r" step (\d+)/", said)), default=0) <= kept, "none is repeated"
        assert list((tmp_path / "tmp").iterdir()) == []
        assert processes_with(setting) == []


KEPT = {"weights", "history.jsonl", "page.html", "workers.log"}


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("| head -2", "bamboo: standard output cannot be written (Broken pipe): the job goes on without"),
        pytest.param(">&- 2>&- <&-", "", marks=pytest.mark.slow),
        pytest.param("--json >/dev/full 2>/dev/full", "", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_nobody_listens_to_trains_and_keeps_what_it_is_to_keep(
    tmp_path: Path, redirection: str, said: str
) -> None:
    job = write(tmp_path, SPIRALS.replace("steps: 600", "steps: 20"))
    command = ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "-", *BAMBOO, "run", job]
    done = subprocess.run([*command, "--output", "out"], capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, said), done.stdout
    assert {file.name for file in (tmp_path / "out").iterdir()} >= KEPT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ascii"), [("kept \xe4", True), ("kept \udcff", False)])
def test_a_folder_may_have_any_name_in_any_locale(tmp_path: Path, name: str, ascii: bool) -> None:
    """One name has a letter that the locale cannot encode, the other a byte that is not UTF-8."""
    job = write(tmp_path, SPIRALS.replace("steps: 600", "steps: 20"))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if ascii else {}
    command = [*BAMBOO, "run", job, "--output", name, "--checkpoints", f"{name}/store", "--trace", f"{name}.json"]
    done = subprocess.run(
        command, capture_output=True, timeout=250, cwd=tmp_path, env={**os.environ, **locale}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == b""
    assert os.fsencode(tmp_path / name) in done.stdout
    assert {file.name for file in (tmp_path / name).iterdir()} >= {*KEPT, "store"}
    assert (tmp_path / name / "weights" / "model.safetensors").exists()
    assert (tmp_path / f"{name}.json").exists()
