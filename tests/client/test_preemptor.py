"""The preemptor of a local run: the workers that it takes, and when it takes them."""

from pathlib import Path

from bamboo.local.preemptor import Preemptor, Strike
from bamboo.local.scheduling import parse, steps_of
from bamboo_core.coordinator.events import Status
from operator_kit import said

ALIVE = {"w0", "w1"}


def due(preemptor: Preemptor, step: int, alive: set[str] = ALIVE, shown: Status | None = None) -> list[object]:
    return list(preemptor.due(step, step, 1.0, 1.0, alive, lambda: shown or said()))


def test_an_owner_is_taken_after_half_of_its_instructions_of_the_step() -> None:
    preemptor = Preemptor(parse(["at:4:1"]), microbatches=4)
    assert preemptor.gate == (3,)
    assert due(preemptor, 3) == []
    for _ in range(4):
        preemptor.begins("w1", 3)
        assert due(preemptor, 3) == []
    preemptor.begins("w1", 3)
    assert due(preemptor, 3) == [Strike(worker="w1", notice=False, where=", in the middle of step 4")]
    assert preemptor.was_taken("w1")
    assert due(preemptor, 4) == []


def test_another_worker_is_taken_if_the_one_that_was_aimed_at_is_gone() -> None:
    preemptor = Preemptor(parse(["at:4"]), microbatches=4)
    assert due(preemptor, 3) == []
    [strike] = due(preemptor, 4, alive=set())
    assert isinstance(strike, Strike)
    assert (strike.worker in ALIVE, strike.where) == (True, "")


def test_an_owner_without_a_part_in_the_step_any_more_is_taken_later() -> None:
    preemptor = Preemptor(parse(["at:4:1"]), microbatches=4)
    assert due(preemptor, 3) == []
    preemptor.begins("w1", 2)
    assert due(preemptor, 3) == []
    preemptor.begins("w1", 6)
    assert due(preemptor, 3) == [Strike(worker="w1", notice=False, where=", in the middle of step 4")]


def test_workers_ask_in_the_steps_of_the_schedule() -> None:
    assert steps_of(parse(["random:1", "at:10:1", "at:4", "at:10:0:notice"])) == (3, 9)


def test_nobody_is_taken_twice_by_a_schedule() -> None:
    preemptor = Preemptor(parse(["at:4:1"]), microbatches=4)
    assert list(preemptor.take("w1", notice=True)) == [Strike(worker="w1", notice=True)]
    assert due(preemptor, 3) == [None]


def test_a_worker_is_taken_with_those_on_its_node() -> None:
    preemptor = Preemptor(parse(["at:4:1"]), microbatches=4, lost_with=lambda worker: ["w0"] if worker == "w1" else [])
    strikes = [one for step in (3, 4) for one in due(preemptor, step)]
    assert strikes == [
        Strike(worker="w1", notice=False, where=", in the middle of step 4"),
        Strike(worker="w0", notice=False, where=", with w1's node"),
    ]
    assert preemptor.was_taken("w0")
    assert list(preemptor.take("w1", notice=True)) == []


def test_who_has_notice_gets_no_second_one_and_may_still_be_killed() -> None:
    preemptor = Preemptor(parse([]), microbatches=4)
    assert len(list(preemptor.take("w1", notice=True))) == 1
    assert list(preemptor.take("w1", notice=True)) == []
    assert list(preemptor.take("w1", notice=False)) == [Strike(worker="w1", notice=False)]


NODES = """{"format":"bamboo-trace","version":1}
{"at":0,"add":"a"}
{"at":0,"add":"b"}
{"at":9,"remove":"a","notice":4}
{"at":20,"remove":"b"}
{"at":30,"add":"c"}
"""


def test_workers_without_a_node_are_taken_once_they_have_joined(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(NODES)
    schedule = parse([f"nodes:{tmp_path}/t.jsonl"])
    preemptor = Preemptor(schedule, microbatches=4)

    def taken(seconds: float, alive: set[str]) -> list[object]:
        return list(preemptor.due(0, 0, 0.0, seconds, alive, said))

    assert (taken(4.0, ALIVE), preemptor.room(4.0, ALIVE)) == ([], 0)
    [notice] = taken(5.0, ALIVE)
    assert isinstance(notice, Strike)
    assert notice.notice
    assert (taken(6.0, ALIVE), preemptor.room(6.0, ALIVE)) == ([], 0)
    [kill] = taken(20.0, ALIVE)
    assert isinstance(kill, Strike)
    assert ({notice.worker, kill.worker}, kill.notice) == (ALIVE, False)
    assert (taken(21.0, {"w2"}), preemptor.room(21.0, {"w2"})) == ([], -1), "it has not joined yet"
    assert preemptor.room(30.0, {"w2"}) == 0
    assert Preemptor(parse([]), microbatches=4).room(0.0, ALIVE) is None
    assert Preemptor(schedule, microbatches=4, per_node=2).room(0.0, ALIVE) == 2, "a node has room for two"
