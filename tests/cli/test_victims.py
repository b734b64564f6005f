"""The choice of the worker that a drill (`bamboo preempt`) takes away, and objections to the drill."""

from typing import Any

import pytest

from bamboo.remote import victims
from bamboo.remote.parsing import workers_of
from bamboo.remote.victims import VictimChoice
from bamboo.terminal.snapshot import RemoteWorker
from bamboo_core.kube.errors import RemoteError, UsageError
from bamboo_core.view.job_view import view_of
from remote_kit import NOW, SPEC, Json, condition, ended, job, pod, stamp

UNPROTECTED = condition("Protected", False, "Unprotected", "stage 2 has no copy")


def workers(*numbers: int, **status: Json) -> tuple[RemoteWorker, ...]:
    return workers_of(view_of(job()), [pod(n, **status.get(f"w{n}", {})) for n in numbers or range(5)])


def chosen(choice: VictimChoice, found: tuple[RemoteWorker, ...] | None = None, body: Json | None = None) -> str:
    return victims.victim(view_of(body or job()), found or workers(), choice, lambda several: several[-1]).name


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (VictimChoice(worker="w3"), "story-w3"),
        (VictimChoice(worker="story-w3"), "story-w3"),
        (VictimChoice(worker="3"), "story-w3"),
        (VictimChoice(worker="w4"), "story-w4"),
        (VictimChoice(stage=2), "story-w2"),
        (VictimChoice(stage=2, pipeline=0), "story-w2"),
        (VictimChoice(random=True), "story-w3"),  # the last of those that train
    ],
)
def test_the_victim_is_whom_the_choice_means(choice: VictimChoice, name: str) -> None:
    assert chosen(choice) == name


@pytest.mark.parametrize(
    ("choice", "found", "body", "said"),
    [
        (VictimChoice(worker="w9"), None, None, "story has no worker w9; there are: w0, w1, w2, w3, w4"),
        (VictimChoice(stage=4), None, None, "--stage 4: the job has stages 0 to 3"),
        (VictimChoice(stage=0, pipeline=1), None, None, "--pipeline 1: the job has pipelines 0 to 0 now"),
        (VictimChoice(stage=0), None, job(plan=None), "story has no plan yet"),
        (
            VictimChoice(stage=0),
            workers(1, 2),
            None,
            "stage 0 of pipeline 0 belongs to story-w0, which is gone already",
        ),
        (VictimChoice(worker="w1"), workers(1, w1=ended(1)), None, "story-w1 has ended already (Error, exit code 1)"),
        (VictimChoice(random=True), workers(4), None, "no worker of story is training"),
    ],
)
def test_a_choice_that_means_nobody_is_refused(
    choice: VictimChoice, found: tuple[RemoteWorker, ...] | None, body: Json | None, said: str
) -> None:
    with pytest.raises(RemoteError, match="^" + said.replace("(", r"\(").replace(")", r"\)")):
        chosen(choice, found, body)


@pytest.mark.parametrize(
    "flags", [{}, {"worker": "w1", "stage": 0}, {"stage": 0, "random": True}, {"random": True, "pipeline": 0}]
)
def test_exactly_one_way_to_choose(flags: Any) -> None:
    with pytest.raises(UsageError):
        VictimChoice(**flags)


NONE = {**SPEC, "redundancy": {"mode": "None"}}


@pytest.mark.parametrize(
    ("body", "kill", "said"),
    [
        (job(), True, None),
        (
            job(training={"step": 1, "lastReportedTime": stamp(300)}),
            False,
            "no operator is running; without an operator",
        ),
        (job(spec=NONE), True, "redundancy.mode None"),
        (job(spec=NONE), False, None),
        (job(conditions=[UNPROTECTED]), False, "is not fully protected (stage 2 has no copy)"),
        (job(conditions=[condition("Protected", False, "RedundancyOff", "mode is None")]), False, None),
        (job(conditions=[condition("Degraded", True, "X", "stage 1 runs on w0, too")]), False, None),
    ],
)
def test_drills_that_could_cost_the_job_are_objected_to(body: Json, kill: bool, said: str | None) -> None:
    objection = victims.objections(view_of(body), NOW, kill=kill)
    assert (objection is None) == (said is None)
    assert (said or "") in (objection or "")
