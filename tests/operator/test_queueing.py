"""A job's requests to its Kueue queue, and when the job gives its quota back. Kueue's webhook is simulated."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from bamboo_core.job.spec import QueueSpec
from bamboo_operator.pods.queueing import (
    FIRST_PAUSE,
    JITTER,
    LAST_PAUSE,
    PATIENCE_SECONDS,
    SETTLE_SECONDS,
    HeldQuota,
    QueueRequest,
    QuotaHolders,
    next_request,
    unmanaged,
    with_priority_class,
)
from operator_kit import job
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_kit"]
GATE = {"name": "kueue.x-k8s.io/admission"}
CLASS = "kueue.x-k8s.io/priority-class"
QUEUE = QueueSpec(name="q", priority_class="high", growth_priority_class="low")
LONGEST_PATIENCE = PATIENCE_SECONDS * (1 + JITTER)
MANAGED = {"kueue.x-k8s.io/managed": "true"}


def pod(kind: str) -> dict[str, Any]:
    """Return a pod. kind: its priority class (h: high, l: low, ?: none), or H, L or ! if Kueue has admitted the pod."""
    named = {"h": "high", "l": "low"}.get(kind.lower())
    gates = [] if kind in "HL!" else [GATE]
    return {"metadata": {"labels": {CLASS: named} if named else {}}, "spec": {"schedulingGates": gates}}


def pods(kinds: str) -> dict[str, dict[str, Any]]:
    return {f"w{number}": pod(kind) for number, kind in enumerate(kinds)}


@pytest.mark.parametrize(
    ("kinds", "room", "priority", "outranked"),
    [
        ("", 2, "high", ()),
        ("h", 1, "high", ()),
        ("hh", 0, "low", ()),  # first what it needs is to be admitted
        ("Hh", 0, "low", ()),
        ("HH", 3, "low", ()),
        ("HHl", 2, "low", ()),
        ("HHlll", 0, "low", ()),
        ("HHLll", 1, "low", ()),
        ("HHLLL", 3, "low", ()),
        ("HLLL", 1, "high", ()),  # one that it needs is lost
        ("HLll", 1, "high", ("w2",)),  # and others wait with too low a priority
        ("lll", 2, "high", ("w0", "w1")),
        ("hHL", 2, "low", ()),  # two are admitted, with which it can train
    ],
)
def test_a_job_asks_first_for_what_it_needs_and_then_for_a_pipeline_more(
    kinds: str, room: int, priority: str, outranked: tuple[str, ...]
) -> None:
    asked = next_request(QUEUE, pods(kinds), fewest=2, pipeline=3)
    assert asked == QueueRequest(room=room, priority=priority, outranked=outranked)


@pytest.mark.parametrize(
    ("queue", "kinds", "priority"),
    [
        (QueueSpec(name="q"), "??", None),
        (QueueSpec(name="q"), "!!?", None),
        (QueueSpec(name="q", priority_class="high"), "HHh", "high"),
        (QueueSpec(name="q", priority_class="high", growth_priority_class="high"), "HHh", "high"),
        (QueueSpec(name="q", growth_priority_class="low"), "?", None),
        (QueueSpec(name="q", growth_priority_class="low"), "!!l", "low"),
    ],
)
def test_a_class_that_is_not_named_is_that_of_the_template_or_of_all(
    queue: QueueSpec, kinds: str, priority: str | None
) -> None:
    asked = next_request(queue, pods(kinds), fewest=2, pipeline=2)
    assert (asked.priority, asked.outranked) == (priority, ())
    assert asked.room == max(0, 2 - len(kinds)) if len(kinds) <= 2 else 1
    made = with_priority_class(pod("?"), priority)
    assert made["metadata"]["labels"] == ({CLASS: priority} if priority else {})


def test_a_job_whose_pods_kueue_has_not_marked_says_that_its_queue_has_no_effect() -> None:
    marked, plain = {"metadata": {"labels": MANAGED}}, {"metadata": {"labels": {}}}
    assert unmanaged(job(queue={"name": "q"}), [marked, plain]) == (
        "spec.queue: Kueue does not manage pods of namespace default (no label kueue.x-k8s.io/managed on workers'"
        " pods), so these workers need no quota"
    )
    assert unmanaged(job(queue={"name": "q"}), [marked]) == ""
    assert unmanaged(job(), [plain]) == ""


# quota held in vain


def after(held: HeldQuota, now: float, *, in_vain: bool = True, trains: bool = False) -> HeldQuota:
    return held.look(in_vain=in_vain, trains=trains, now=now)


def test_only_the_time_counts_in_which_pods_wait_at_kueues_gate() -> None:
    held = after(HeldQuota(uid="u"), 100.0)
    assert 100 + PATIENCE_SECONDS <= held.due <= 100 + LONGEST_PATIENCE
    assert after(held, 150.0) == held
    assert after(held, 150.0, in_vain=False).due == math.inf
    assert after(after(held, 150.0, in_vain=False), 160.0).due > 160 + PATIENCE_SECONDS - 1


def test_a_job_that_lets_go_again_and_again_asks_less_and_less_often_until_it_trains() -> None:
    held, pauses = HeldQuota(uid="u"), list[float]()
    for _ in range(8):
        held = after(held, 0.0).let_go(70.0, held=1, fewest=2)
        pauses.append(held.until - 70.0)
    least = [min(LAST_PAUSE, FIRST_PAUSE * 2**times) for times in range(8)]
    assert all(low <= pause <= low * (1 + JITTER) for low, pause in zip(least, pauses, strict=True)), pauses
    assert after(held, 2000.0, trains=True) == HeldQuota(uid="u")
    (problem,) = held.problem(71.0)
    assert problem.message == (
        "the queue admitted 1 of the 2 workers with which the job can begin, within 70 s; the job lets them go, and"
        f" asks again after {pauses[-1]:.0f} s"
    )
    assert not list(held.problem(2000.0))


def test_two_jobs_neither_let_go_nor_return_together() -> None:
    dues = {after(HeldQuota(uid=f"uid-{number}"), 0.0).due for number in range(20)}
    returns = {after(HeldQuota(uid=f"uid-{number}"), 0.0).let_go(0.0, 1, 2).until for number in range(20)}
    assert min(len(dues), len(returns)) > 15


def test_the_youngest_job_lets_go_and_the_next_one_only_if_that_did_not_help() -> None:
    holders = QuotaHolders()
    holders.note(("a", "old"), (100.0, "u9"))
    holders.note(("a", "young"), (200.0, "u1"))
    holders.note(("b", "same"), (200.0, "u2"))
    assert not holders.lets_go(("a", "old"), 1000.0)
    assert not holders.lets_go(("a", "young"), 1000.0)
    assert holders.lets_go(("b", "same"), 1000.0)
    assert not holders.lets_go(("a", "young"), 1000.0 + SETTLE_SECONDS - 1)
    holders.forget(("a", "young"))
    assert holders.lets_go(("a", "old"), 1000.0 + SETTLE_SECONDS)


# pods


def queue_of(**classes: str) -> dict[str, Any]:
    return {"queue": {"name": "team", **classes}}


def admit(place: Place, *names: str) -> None:
    for name in names:
        place.open_gate(name)


async def test_a_jobs_pods_wait_at_the_gate_and_it_says_for_what(begin: Callable[..., Job]) -> None:
    place = Place()
    place.kueue = True
    queued = begin(place, **queue_of(), standby={"workers": 1})
    await queued.reconciles()
    assert sorted(place.pods) == ["tiny-w0", "tiny-w1"]
    waits = "2 worker(s) wait for quota in Kueue's queue team; 1 more are requested once these are admitted"
    assert queued.problems() == {"WaitingForQuota": waits}
    assert [emit.warning for emit in queued.runner.events if emit.reason == "WaitingForQuota"] == [False]
    admit(place, "tiny-w0", "tiny-w1")
    await queued.reconciles()
    assert queued.problems() == {"WaitingForQuota": "1 worker(s) wait for quota in Kueue's queue team"}
    assert queued.controller.unmanaged == ""


async def test_without_kueue_a_job_has_its_pods_at_once_and_says_so(begin: Callable[..., Job]) -> None:
    place = Place()
    queued = begin(place, **queue_of(), standby={"workers": 3})
    await queued.reconciles()
    assert len(place.pods) == 5
    assert queued.problems() == {}
    assert "does not manage pods of namespace default" in queued.controller.unmanaged


async def test_time_at_kueues_gate_is_not_taken_for_a_lack_of_nodes(begin: Callable[..., Job]) -> None:
    place = Place()
    place.kueue = True
    pools = [{"name": "spot"}, {"name": "dear", "afterSeconds": 300}]
    queued = begin(place, **queue_of(), nodePools=pools)
    await queued.reconciles()
    await queued.reconciles(5000)
    assert set(place.pools().values()) == {"spot"}
    admit(place, "tiny-w0", "tiny-w1")
    await queued.reconciles(count=1)
    await queued.reconciles(290)
    assert set(place.pools().values()) == {"spot"}
    await queued.reconciles(20)
    assert place.deleted == ["tiny-w0", "tiny-w1"]
    assert place.pools() == {"tiny-w2": "dear", "tiny-w3": "dear"}


def nodes_come(place: Place, queued: Job) -> None:
    """Let Kueue admit the two pods with which the job can train, so that these only wait for nodes."""
    admit(place, "tiny-w0", "tiny-w1")


def nothing_is_admitted(place: Place, queued: Job) -> None:
    pass


def it_trains(place: Place, queued: Job) -> None:
    """Let the job train and lose a worker, for whose replacement there is no quota."""
    admit(place, "tiny-w0", "tiny-w1")
    queued.train()
    place.take("tiny-w1")


@pytest.mark.parametrize("happens", [nodes_come, nothing_is_admitted, it_trains])
async def test_who_waits_for_nodes_or_holds_nothing_or_trains_does_not_let_go(
    begin: Callable[..., Job], happens: Callable[[Place, Job], None]
) -> None:
    place = Place()
    place.kueue = True
    queued = begin(place, **queue_of(), standby={"workers": 1})
    await queued.reconciles()
    happens(place, queued)
    await queued.reconciles()
    await queued.reconciles(10 * LONGEST_PATIENCE)
    assert place.deleted == []
    assert "QuotaGivenBack" not in queued.told()
