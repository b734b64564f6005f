"""`bamboo bench` from end to end, by real workers: stopped, continued, and read by `bamboo plan`."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

import pretended_gpu
from bamboo.bench import execution
from bamboo.bench.bench_measurements import list_measurements
from bamboo.bench.bench_run import still_known, write_report
from bamboo.bench.report import BenchPart, BenchReport, parse_report, report_to_json
from bamboo.bench.sizes import BenchSizes, choose_sizes
from bamboo.cli.commands import app
from bamboo.local.fork_server import ForkServerError
from bamboo.local.trainer_calls.trainer_process import ask_trainer
from bamboo.profiles.files import read_profile
from bamboo_core.names import EXIT_USAGE
from bamboo_core.planning.profile import ProfileError
from bench_kit import WHOLE, machine, measured, report
from sizing_kit import PRICES

SECONDS = 600.0
BAMBOO = [sys.executable, "-m", "bamboo"]


def command(folder: Path, parts: str) -> list[str]:
    return [*BAMBOO, "bench", "--quick", "--parts", parts, "--output", str(folder)]


def found(folder: Path) -> BenchReport:
    return parse_report("report", (folder / "report.json").read_bytes())


def of_group(group: int) -> list[str]:
    """The processes of a session that have not ended."""
    said = subprocess.run(["ps", "-o", "pid=", "-s", str(group)], capture_output=True, text=True, check=False)
    return said.stdout.split()


@pytest.mark.timeout(1.5 * SECONDS)
def test_a_stopped_run_leaves_nothing_and_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, parts = tmp_path / "bench", "checks,trace,profile"
    with subprocess.Popen(command(folder, parts), stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if line.startswith("[2/"):
                break
        time.sleep(1.0)  # the job of the second measurement has begun
        first.send_signal(signal.SIGINT)
        assert "the same command goes on" in first.stderr.read()
    assert first.returncode == 130
    assert of_group(first.pid) == []
    before = found(folder)
    assert ([one.part for one in before.results], before.complete) == ([BenchPart.CHECKS], False)

    second = subprocess.run(command(folder, parts), capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert "[1/" not in second.stderr
    after = found(folder)
    assert after.complete
    assert after.results[0] == before.results[0]
    assert not [one.problem for one in after.results if one.problem]
    assert [one.bits_equal for one in after.of_part(BenchPart.CHECKS)] == [None, True]
    (traced,) = after.of_part(BenchPart.TRACE)
    assert abs(sum(traced.shares.values()) - 1) < 0.01
    assert [one.device for one in traced.device_times] == ["w0's processor", "w1's processor"]
    assert all(0 < one.computing < 1 for one in traced.device_times)
    assert [one.worker for one in traced.thread_times] == ["w0", "w1"]
    assert all(0 <= one.waits < 1 for one in traced.thread_times)
    assert "Self-checks" in second.stdout
    assert "TOO FAR" not in second.stdout, "the plain process trains otherwise than Bamboo"
    assert "<h2>Self-checks</h2>" in (folder / "report.html").read_text()

    assert planned(tmp_path, after, folder / "report.json") == 0


def planned(folder: Path, of: BenchReport, profile: Path) -> int:
    """The exit code of `bamboo plan` for the measured job, by the measured profile."""
    spec = {
        "task": {"entrypoint": of.model.entrypoint, "config": of.model.config},
        "training": {"steps": 50, "globalBatchSize": 4, "microBatchSize": 1},
        "topology": {"stages": 2},
    }
    document = {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": "a"}, "spec": spec}
    machines = {"small": {"spot": 1.0, "onDemand": 3.0, "profile": str(profile)}}
    (folder / "job.yaml").write_text(json.dumps(document))
    (folder / "prices.yaml").write_text(yaml.safe_dump({**PRICES, "machines": machines}))
    files = [str(folder / "job.yaml"), "--prices", str(folder / "prices.yaml"), "--jobs", "1"]
    few = ["--nodes", "2", "--seeds", "2", "--micro-batch", "1", "--preempt-rate", "0.1", "--hours", "0.1"]
    return CliRunner().invoke(app, ["plan", *files, *few]).exit_code


def test_a_part_that_is_measured_again_leaves_the_others_as_they_are() -> None:
    """As when the first hour had no time for all, and the next command names a part."""
    sizes = choose_sizes(machine(gpus=2), quick=False)
    assert isinstance(sizes, BenchSizes)
    listed = list_measurements(machine(gpus=2), sizes, (BenchPart.THROUGHPUT, BenchPart.TRACE), rounds=1, quick=False)
    first, second, *_ = [one for one in listed if one.part is BenchPart.THROUGHPUT]
    traced = next(one for one in listed if one.part is BenchPart.TRACE)
    found = report(
        msgspec.structs.replace(measured(BenchPart.THROUGHPUT, first.side, (1.0,)), key=first.key),
        msgspec.structs.replace(measured(BenchPart.THROUGHPUT, second.side, problem="no time"), key=second.key),
        msgspec.structs.replace(measured(BenchPart.TRACE, traced.side, problem="no time"), key=traced.key),
    )
    assert [one.key for one in still_known(found, listed, (BenchPart.THROUGHPUT,))] == [first.key, traced.key]
    assert [one.key for one in still_known(found, listed, (BenchPart.TRACE,))] == [first.key, second.key]
    assert [one.key for one in still_known(found, listed, tuple(BenchPart))] == [first.key]


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = CliRunner().invoke(app, ["bench", "--output", str(tmp_path)])
    finally:
        os.close(lock)
    assert done.exit_code == 1
    assert done.stderr == f"bamboo: another bamboo bench writes to {tmp_path}; expected its end, or a new folder\n"


def test_a_full_disk_leaves_the_report_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no file takes any more: the report stays as it was, and nothing half written beside it."""

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    write_report(tmp_path, report(*WHOLE))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path, report(complete=True))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_the_system_refuses_in_a_measurement_is_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when temporary files find no room: it is measured by the next run, and this one goes on."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/somewhere")

    def stopped(*_: object, **__: object) -> None:
        raise SystemExit(130)

    sizes = choose_sizes(machine(), quick=True)
    assert isinstance(sizes, BenchSizes)
    one = list_measurements(machine(), sizes, (BenchPart.CHECKS,), rounds=1, quick=True)[0]
    monkeypatch.setattr(execution, "ask_trainer", refused)
    assert execution.measure(one, machine(), sizes, 60.0)[0].problem == "/tmp/somewhere: No space left on device"
    monkeypatch.setattr(execution, "ask_trainer", stopped)
    with pytest.raises(execution.BenchInterrupted):
        execution.measure(one, machine(), sizes, 60.0)


def test_what_hangs_is_given_up_by_the_clock() -> None:
    """However busy the machine is: else a part would take more than its ten minutes."""
    hangs = {"object_list": [], "timeout": 1000.0}
    with pytest.raises(ForkServerError, match="it failed: it was not done within 1 s"):
        ask_trainer("multiprocessing.connection:wait", hangs, (), seconds=1000.0, failed="it failed", most=1.0)


def test_a_report_without_a_profile_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(report_to_json(report(*WHOLE)))
    assert parse_report("report", path.read_bytes()) == report(*WHOLE)
    with pytest.raises(ProfileError, match="part `profile` was not measured"):
        read_profile(str(path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parts", "speed"], "--parts 'speed': expected some of machine, checks,"),
        (["--parts", ","], "--parts ',': expected some of"),
        (["--output", __file__], "expected a folder"),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == EXIT_USAGE
    assert told in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("pretended", [False, True])
def test_all_parts_are_measured_on_processors_and_on_pretended_gpus(tmp_path: Path, pretended: bool) -> None:
    if pretended and shutil.which(pretended_gpu.COMPILER) is None:
        pytest.skip("no compiler")
    there = pretended_gpu.environment(pretended_gpu.built()) if pretended else dict(os.environ)
    parts = ",".join(BenchPart)
    done = subprocess.run(command(tmp_path / "bench", parts), env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = found(tmp_path / "bench")
    problems = {one.part for one in whole.results if one.problem and "--quick" not in one.problem}
    assert problems == ({BenchPart.MEMORY} if pretended else set()), "nobody knows a pretended GPU's memory"
    assert len(whole.of_part(BenchPart.KILLS)[0].kills) == 1
    assert whole.of_part(BenchPart.KILLS)[0].bits_equal
    assert whole.profile is not None
    assert whole.machine.is_gpu is pretended
    (traced,) = whole.of_part(BenchPart.TRACE)
    assert len(traced.device_times) == (0 if pretended else 2), "no driver says what a pretended GPU does"
    assert len(traced.thread_times) == 2
