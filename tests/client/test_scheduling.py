"""The schedule of --preempt: parsing, due preemptions, and the worker that is preempted."""

from pathlib import Path

import pytest

from bamboo.local.scheduling import AtStep, Preemption, Room, Schedule, check, due, parse, room_at, victim
from bamboo_core.coordinator.events import WorkerState
from bamboo_core.job.manifest import parse_manifest
from job_simulation_kit import manifest
from manifest_kit import bamboojob, training
from operator_kit import said

JOB = {"task": {"entrypoint": "m:build"}, "training": training(10, 8, 2)}

STATUS = said(
    grid=((("w0", True), ("w2", False)),),
    workers=(
        ("w0", WorkerState.TRAINING),
        ("w2", WorkerState.TRAINING),
        ("w3", WorkerState.STANDBY),
        ("w4", WorkerState.LEAVING),
    ),
)


def recorded(folder: Path, text: str) -> str:
    """Write a recording of nodes and return its path."""
    (folder / "t.csv").write_text(text)
    return str(folder / "t.csv")


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("at:4", AtStep(step=3)),
        ("at:4:1", AtStep(step=3, stage=1)),
        ("at:1:notice", AtStep(step=0, notice=True)),
        ("at:4:2:notice", AtStep(step=3, stage=2, notice=True)),
    ],
)
def test_at_is_parsed(text: str, entry: AtStep) -> None:
    assert parse([text]).entries == (entry,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sometimes", "expected none, random:RATE"),
        ("none:1", "expected none"),
        ("random", "RATE .* must be a number, not ''"),
        ("random:-1", "between 0 and 600"),
        ("random:nan", "must be finite"),
        ("at", "STEP must be a whole number"),
        ("at:-1", "STEP must be a whole number"),
        ("at:0", "STEP must be 1 or more: the first step is step 1"),
        ("at:1:x", "STAGE must be a whole number"),
        ("at:1:2:3", r"expected at:STEP\[:STAGE\]"),
        ("trace:", "FILE is missing"),
        ("nodes:", "FILE is missing"),
        ("trace:/no/such.csv", "cannot read /no/such.csv: No such file"),
    ],
)
def test_wrong_preemptions_are_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse([text])
    assert str(caught.value).startswith(f"--preempt {text}: ")


@pytest.mark.parametrize(
    "content",
    [
        "0,add,a\n1000, remove, a\n\n# noise\n4000,remove,b\n",
        '{"format":"bamboo-trace","version":1}\n{"at":0,"add":"a"}\n{"at":0,"add":"b"}\n'
        '{"at":1,"remove":"a"}\n{"at":4,"remove":"b"}\n',
    ],
)
def test_a_trace_takes_workers_at_its_times(tmp_path: Path, content: str) -> None:
    schedule = parse([f"trace:{recorded(tmp_path, content)}:2"])
    assert due(schedule, 0, 0.4)[0] == ()
    actions, schedule = due(schedule, 0, 0.5)
    assert len(actions) == 1
    assert due(schedule, 0, 1.9)[0] == ()
    actions, schedule = due(schedule, 9, 100.0)
    assert len(actions) == 1
    assert due(schedule, 9, 200.0)[0] == ()


COMING_AND_GOING = """{"format":"bamboo-trace","version":1}
{"at":0,"add":"a"}
{"at":0,"add":"b"}
{"at":60,"remove":"a","notice":20}
{"at":80,"remove":"b"}
{"at":80,"add":"c"}
{"at":90,"add":"d"}
"""


def test_there_is_room_for_as_many_workers_as_there_are_nodes_without_notice(tmp_path: Path) -> None:
    schedule = parse([f"nodes:{recorded(tmp_path, COMING_AND_GOING)}:2"])
    assert due(schedule, 100, 100.0)[0] == ()
    assert schedule.rooms == (
        Room(at=0.0, nodes=2, notice=False),
        Room(at=20.0, nodes=1, notice=True),
        Room(at=40.0, nodes=1, notice=False),
        Room(at=45.0, nodes=2, notice=False),
    )
    assert [getattr(room_at(schedule, at), "nodes", None) for at in (0.0, 19.9, 20.0, 44.0, 1e6)] == [2, 2, 1, 1, 2]
    assert room_at(parse([]), 0.0) is None


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("nodes", '{"format":"bamboo-trace","version":1}\n{"at":0,"zone":"a","price":0.5}\n', "no node that comes or"),
        ("trace", "5,add,n\n", "no removal of a node"),
        ("trace", "5,add\n", "line 1: expected milliseconds,add"),
    ],
)
def test_a_recording_that_is_of_no_use_is_refused(tmp_path: Path, kind: str, content: str, problem: str) -> None:
    path = recorded(tmp_path, content)
    with pytest.raises(ValueError, match=rf"--preempt {kind}:{path}: {path} .*{problem}"):
        parse([f"{kind}:{path}"])


def test_a_job_that_never_has_enough_nodes_to_begin_is_refused(tmp_path: Path) -> None:
    schedule = parse([f"nodes:{recorded(tmp_path, COMING_AND_GOING)}"])
    said = r"--preempt nodes: expected 4 nodes at a time, as the job begins with no fewer than 4 workers; .* has 2"
    with pytest.raises(ValueError, match=said):
        check(schedule, parse_manifest(bamboojob(topology={"stages": 4}, **JOB)))
    check(schedule, parse_manifest(bamboojob(topology={"stages": 4}, spread={"workersPerNode": 2}, **JOB)))
    check(schedule, parse_manifest(bamboojob(elastic={"maxWorkers": 4}, **JOB)))


def test_nodes_of_one_recording_come_and_go(tmp_path: Path) -> None:
    nodes = f"nodes:{recorded(tmp_path, COMING_AND_GOING)}"
    with pytest.raises(ValueError, match=f"--preempt {nodes}: nodes: may be given once"):
        parse([nodes, nodes])


def test_a_step_is_due_once_even_if_it_was_skipped() -> None:
    schedule = parse(["none", "at:6:1:notice"])
    assert due(schedule, 4, 0.0) == ((), schedule)
    actions, schedule = due(schedule, 7, 0.0)
    assert [(a.stage, a.notice) for a in actions] == [(1, True)]
    assert due(schedule, 8, 0.0)[0] == ()


def test_random_preemptions_have_the_rate_and_follow_the_seed() -> None:
    def times(seed: int) -> list[float]:
        schedule, found = parse(["random:30"], seed=seed), []
        for tick in range(12_000):  # ten minutes
            actions, schedule = due(schedule, 0, tick / 20)
            found += [tick / 20] * len(actions)
        return found

    assert times(1) == times(1) != times(2)
    assert 240 < len(times(1)) < 360
    assert due(parse(["random:0"]), 0, 1e9)[0] == ()


@pytest.mark.parametrize("text", ["at:100001", "at:3:2"])
def test_what_can_never_happen_is_refused(text: str) -> None:
    spec = parse_manifest(manifest(2, 1, 4))
    with pytest.raises(ValueError, match=text):
        check(parse([text]), spec)
    check(parse(["at:10:1", "random:1"]), spec)


def test_a_stage_that_the_grid_may_come_to_have_can_be_hit() -> None:
    spec = parse_manifest(manifest(None, 2, 4, elastic={"maxWorkers": 8}))
    check(parse(["at:10:3"]), spec)
    with pytest.raises(ValueError, match="the job has stages 0 to 3"):
        check(parse(["at:10:4"]), spec)


def test_the_victim_is_of_the_stage_and_alive() -> None:
    assert victim(Preemption(pick=0.9, stage=1), STATUS) == "w2"
    assert victim(Preemption(pick=0.9), STATUS) == "w3"
    assert victim(Preemption(pick=0.0), STATUS, gone=["w0"]) == "w2"
    assert victim(Preemption(pick=0.0, stage=1), STATUS, gone=["w2"]) is None
    assert victim(Preemption(pick=0.0, stage=7), STATUS) is None
    assert due(Schedule(), 1, 1.0) == ((), Schedule())
