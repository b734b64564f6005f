"""Node marks that an installation configures (--node-marks): matching nodes, signals, and errors in the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.job.fields import ManifestError
from bamboo_operator.signals.node_marks import NodeMark, read_marks
from bamboo_operator.signals.signals import SignalKind, node_signal, worker_signal
from operator_kit import NOW, node, pod
from opsim_kopf import node_event
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_kit"]

KEY = "rack.example/repair"


def marks(folder: Path, *given: Any) -> tuple[NodeMark, ...]:
    file = folder / "marks.yaml"
    file.write_text(yaml.safe_dump({"nodeMarks": list(given)}))
    return read_marks(file)


def condition(status: str, reason: str = "") -> tuple[dict[str, str], ...]:
    return ({"type": "Power", "status": status, "reason": reason},)


@pytest.mark.parametrize(
    ("where", "on", "not_on"),
    [
        ({"taint": {"key": KEY}}, node(taints={KEY: "x"}), node(labels={KEY: "x"})),
        ({"taint": {"key": KEY, "value": "now"}}, node(taints={KEY: "now"}), node(taints={KEY: "later"})),
        ({"taint": {"key": KEY, "value": ""}}, node(taints={KEY: ""}), node(taints={KEY: "later"})),
        ({"label": {"key": KEY}}, node(labels={KEY: ""}), node(annotations={KEY: ""})),
        ({"label": {"key": KEY, "value": "now"}}, node(labels={KEY: "now"}), node(labels={KEY: "later"})),
        ({"annotation": {"key": KEY}}, node(annotations={KEY: "at 5"}), node(labels={KEY: "at 5"})),
        ({"condition": {"type": "Power"}}, node(conditions=condition("True")), node(conditions=condition("False"))),
        (
            {"condition": {"type": "Power", "status": "False"}},
            node(conditions=condition("False")),
            node(conditions=condition("True")),
        ),
        (
            {"condition": {"type": "Power", "reason": "Off"}},
            node(conditions=condition("True", "Off")),
            node(conditions=condition("True", "Low")),
        ),
    ],
)
def test_a_mark_is_seen_where_it_is_said_to_be(tmp_path: Path, where: Any, on: Any, not_on: Any) -> None:
    own = marks(tmp_path, {"reason": "RackRepair", "noticeSeconds": 90, **where})
    signal = node_signal(on, NOW, own)
    assert signal is not None
    assert (signal.kind, signal.source, signal.seconds) == (SignalKind.NOTICE, "RackRepair", 90.0)
    assert signal.message == f"node n1 has the {next(iter(where))} {where[next(iter(where))].get('key', 'Power')}"
    assert node_signal(not_on, NOW, own) is None
    assert node_signal(on, NOW) is None


def test_the_earliest_deadline_holds_and_gone_is_gone(tmp_path: Path) -> None:
    own = marks(
        tmp_path,
        {"reason": "Repair", "label": {"key": KEY}, "noticeSeconds": 300},
        {"reason": "PowerOff", "annotation": {"key": KEY}, "gone": True},
    )
    both = node(labels={KEY: "x"}, taints={"karpenter.sh/disrupted": ""})
    assert getattr(worker_signal(pod(), both, NOW, own), "source", None) == "KarpenterDisruption"
    gone = worker_signal(pod(), node(labels={KEY: "x"}, annotations={KEY: "x"}), NOW, own)
    assert gone is not None
    assert (gone.kind, gone.source, gone.seconds) == (SignalKind.LOST, "PowerOff", 0)


async def test_the_jobs_on_that_node_hear_of_it_and_of_its_end(tmp_path: Path, begin: Callable[..., Job]) -> None:
    own = marks(tmp_path, {"reason": "RackRepair", "label": {"key": KEY, "value": "planned"}, "noticeSeconds": 90})
    place = Place()
    job = begin(place, marks=own)
    await job.start()
    worker = sorted(place.pods)[0]
    there: dict[str, Any] = {"metadata": {"name": f"node-of-{worker}", "uid": "n"}, "spec": {}, "status": {}}
    node_event(place.cluster, "ADDED", there)
    assert "RackRepair" not in job.told()
    node_event(place.cluster, "MODIFIED", {**there, "metadata": {**there["metadata"], "labels": {KEY: "planned"}}})
    await job.ticks(0.0)
    assert {"RackRepair", "NoticeReceived"} <= set(job.told())
    assert not job.runner.state.stays(worker)
    node_event(place.cluster, "MODIFIED", there)
    await job.ticks(0.0)
    assert "NoticeWithdrawn" in job.told()


WRONG: list[tuple[Any, str]] = [
    ({"reason": "A", "taint": {"key": KEY}}, "nodeMarks[0]: expected noticeSeconds or gone: true, got neither"),
    (
        {"reason": "A", "taint": {"key": KEY}, "noticeSeconds": 3, "gone": True},
        "nodeMarks[0]: expected noticeSeconds or gone: true, got both",
    ),
    (
        {"reason": "A", "gone": True},
        "nodeMarks[0]: expected exactly one of taint, label, annotation, condition, got none",
    ),
    (
        {"reason": "A", "gone": True, "taint": {"key": KEY}, "label": {"key": KEY}},
        "nodeMarks[0]: expected exactly one of taint, label, annotation, condition, got taint and label",
    ),
    ({"taint": {"key": KEY}, "gone": True}, "nodeMarks[0].reason: required, expected a word in CamelCase"),
    ({"reason": "a b", "taint": {"key": KEY}, "gone": True}, "nodeMarks[0].reason: expected a word in CamelCase"),
    ({"reason": "A", "taint": {"value": "x"}, "gone": True}, "nodeMarks[0].taint.key: required, expected a label key"),
    ({"reason": "A", "taint": {"key": "no good"}, "gone": True}, "nodeMarks[0].taint.key: expected a label key"),
    ({"reason": "A", "taint": {"key": KEY, "value": True}, "gone": True}, "nodeMarks[0].taint.value: expected a text"),
    (
        {"reason": "A", "condition": {"type": "X", "status": "yes"}, "gone": True},
        "nodeMarks[0].condition.status: expected one of True, False, Unknown",
    ),
    ({"reason": "A", "taint": {"key": KEY}, "noticeSeconds": 0}, "nodeMarks[0].noticeSeconds: expected a number > 0"),
    (
        {"reason": "A", "taint": {"key": KEY}, "noticeSecond": 3, "gone": True},
        "nodeMarks[0].noticeSecond: unknown field, did you mean noticeSeconds?",
    ),
    ({"reason": "A", "gone": True, "taints": {"key": KEY}}, "nodeMarks[0].taints: unknown field, did you mean taint?"),
    ("a taint", "nodeMarks[0]: expected an object"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(ManifestError) as refused:
        marks(tmp_path, given)
    (problem,) = refused.value.problems
    assert str(problem).startswith(said)
