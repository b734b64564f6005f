"""`bamboo rollout`, as it is typed."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bamboo.remote.rollout import WorkerRevision, difference, revision_to_restore
from bamboo_core.job.placement_spec import WorkerSpec
from remote_command_kit import Fake, type_in
from remote_kit import SPEC, Asked, Json, condition, job

TASK = {
    "task": {"entrypoint": "m:build"},
    "training": {"steps": 1000, "globalBatchSize": 8, "microBatchSize": 2},
    "topology": {"stages": 4},
}
SECTIONS: list[Json] = [
    {"image": "train:1"},
    {"image": "train:2", "template": {"metadata": {"labels": {"a": "b"}}}},
    {"image": "train:3", "resources": {"limits": {"memory": "2Gi"}}},
]


def revision(number: int, worker: Json) -> Json:
    metadata = {"name": f"story-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "revision": number, "data": {"spec": {**TASK, "worker": worker}}}


class WithRevisions(Fake):
    """A job whose operator has accepted these sections, the last one now."""

    def __init__(self, body: Json, sections: list[Json]) -> None:
        super().__init__(body)
        self.kept = [revision(3 * number + 1, worker) for number, worker in enumerate(sections)][::-1]

    def __call__(self, asked: Asked) -> tuple[int, Any]:
        if asked.path.endswith("/controllerrevisions"):
            assert asked.query["labelSelector"] == "bamboo.dev/job-uid=uid-story"
            return 200, {"items": self.kept}
        return super().__call__(asked)


def rolling(state: str, updated: int = 1, message: str = "", **more: Any) -> Json:
    rollout = {"revision": "abc", "state": state, "updated": updated, "total": 4, "message": message}
    return job(rollout=rollout, observedGeneration=1, **more)


SPENT = condition("Suspended", True, "BudgetSpent", "all 5 spent")


def patches(asked: list[Asked]) -> list[Any]:
    return [one.body for one in asked if one.method == "PATCH"]


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (rolling("Complete", 4), 0, "all workers of story are of revision abc"),
        (rolling("Progressing"), 0, "1 of 4 workers of story are of revision abc"),
        (rolling("Paused"), 0, "1 of 4 workers of story are of revision abc; the rollout is paused"),
        (rolling("Stalled", 0, "no image"), 1, "revision abc; the rollout has stalled: no image"),
        (job(), 0, "waiting for the operator to see the newest change of story"),
        (job(state="Failed", conditions=[condition("Failed", True)]), 1, "story is over (Failed)"),
        (job(spec={**SPEC, "suspend": True}), 0, "story is suspended; all its workers are made anew"),
        (rolling("Progressing", conditions=[SPENT]), 0, "story is suspended (all 5 spent); all its workers are made"),
        (
            job(conditions=[SPENT], rollout={"revision": "abc", "state": "Progressing"}),
            0,
            "waiting for the operator to see the newest change of story",
        ),
    ],
)
def test_rollout_status_says_how_far_it_is_and_exits_accordingly(
    tmp_path: Path, body: Json, code: int, said: str
) -> None:
    ended, printed, complained, _ = type_in(tmp_path, Fake(body), "rollout", "status", "story", "--no-watch")
    assert (ended, complained) == (code, "")
    assert said in printed


def test_it_is_waited_for_until_it_is_over(tmp_path: Path) -> None:
    class Moves(Fake):
        asked = 0

        def __call__(self, asked: Asked) -> tuple[int, Any]:
            self.asked += asked.path.endswith("/bamboojobs/story")
            self.body = rolling("Progressing", 2) if self.asked < 3 else rolling("Complete", 4)
            return super().__call__(asked)

    code, printed, _, _ = type_in(tmp_path, Moves(job()), "rollout", "status", "story")
    assert (code, printed.splitlines()) == (
        0,
        ["2 of 4 workers of story are of revision abc", "all workers of story are of revision abc"],
    )
    stuck = type_in(tmp_path, Fake(rolling("Progressing")), "rollout", "status", "story", "--timeout", "0s")
    assert stuck[0] != 0
    assert "the rollout of story was not over within 0 s" in stuck[2]


@pytest.mark.parametrize(("verb", "paused"), [("pause", True), ("resume", False)])
def test_a_pause_is_a_field_of_the_job(tmp_path: Path, verb: str, paused: bool) -> None:
    before = job(spec={**SPEC, "rollout": {"paused": not paused}})
    code, printed, _, asked = type_in(tmp_path, Fake(before), "rollout", verb, "story")
    assert (code, printed) == (0, f"the rollout of story is {verb}d\n")
    assert patches(asked) == [{"metadata": {"uid": "uid-story"}, "spec": {"rollout": {"paused": paused}}}]
    again = type_in(tmp_path, Fake(job(spec={**SPEC, "rollout": {"paused": paused}})), "rollout", verb, "story")
    assert (again[0], patches(again[3])) == (0, [])


def with_sections(now: int = 2) -> WithRevisions:
    return WithRevisions(job(spec={**SPEC, **TASK, "worker": SECTIONS[now]}), SECTIONS)


def test_rollout_history_lists_the_revisions_and_which_is_in_force(tmp_path: Path) -> None:
    _, printed, _, _ = type_in(tmp_path, with_sections(), "rollout", "history", "story")
    assert printed == "REVISION  IMAGE\n1         train:1\n4         train:2\n7         train:3  in force\n"


@pytest.mark.parametrize(
    ("flags", "number", "change"),
    [
        ([], 4, {"image": "train:2", "resources": None, "template": SECTIONS[1]["template"]}),
        (["--to-revision", "1"], 1, {"image": "train:1", "resources": None}),
    ],
)
def test_rollout_undo_writes_the_worker_section_of_that_revision(
    tmp_path: Path, flags: list[str], number: int, change: Json
) -> None:
    code, printed, _, asked = type_in(tmp_path, with_sections(), "rollout", "undo", "story", *flags)
    assert (code, printed) == (0, f"story goes back to the worker section of revision {number}\n")
    assert patches(asked) == [{"metadata": {"uid": "uid-story"}, "spec": {"worker": change}}]


@pytest.mark.parametrize("flags", [["--to-revision", "7"], ["--to-revision", "99"]])
def test_there_is_nothing_to_go_back_to(tmp_path: Path, flags: list[str]) -> None:
    code, _, complained, asked = type_in(tmp_path, with_sections(), "rollout", "undo", "story", *flags)
    assert (code != 0, patches(asked)) == (True, [])
    assert f"story has no revision {flags[1]} with another worker section; there are: 1, 4, 7" in complained


def test_the_newest_other_one_is_the_one_before() -> None:
    """Also if the newest edit was never accepted, such as while the operator is away."""
    kept = [WorkerRevision(number=n, created=None, worker=WorkerSpec(image=i), raw={}) for n, i in ((1, "a"), (2, "b"))]
    for now, number in (("b", 1), ("a", 2), ("c", 2)):
        chosen = revision_to_restore(kept, WorkerSpec(image=now), None)
        assert chosen is not None
        assert chosen.number == number
    assert revision_to_restore(kept[:1], WorkerSpec(image="a"), None) is None


@pytest.mark.parametrize(
    ("now", "wanted", "patch"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1, "b": {"c": 1, "d": [1]}}, {"b": {"c": 2}}, {"a": None, "b": {"c": 2, "d": None}}),
        ({"b": {"c": 1}}, {"b": [1]}, {"b": [1]}),
        ({}, {"b": {}}, {"b": {}}),
    ],
)
def test_a_merge_patch_takes_away_what_is_not_wanted(now: Json, wanted: Json, patch: Json) -> None:
    assert difference(now, wanted) == patch


def test_a_restart_marks_the_template_so_that_every_worker_is_out_of_date(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    code, printed, _, asked = type_in(tmp_path, with_sections(), "rollout", "restart", "story")
    assert (code, printed) == (0, "the workers of story are replaced one after the other\n")
    (patch,) = patches(asked)
    annotations = patch["spec"]["worker"]["template"]["metadata"]["annotations"]
    assert patch == {
        "metadata": {"uid": "uid-story"},
        "spec": {"worker": {"template": {"metadata": {"annotations": annotations}}}},
    }
    assert before <= datetime.fromisoformat(annotations["bamboo.dev/restarted-at"]) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"rollout": {"paused": True}}, "the rollout of story is paused; run `bamboo rollout resume story` first"),
        ({"suspend": True}, "story is suspended; all its workers are made anew when it is resumed"),
    ],
)
def test_what_cannot_begin_now_is_refused(tmp_path: Path, spec: Json, said: str) -> None:
    code, _, complained, asked = type_in(tmp_path, Fake(job(spec={**SPEC, **spec})), "rollout", "restart", "story")
    assert (code != 0, patches(asked)) == (True, [])
    assert said in complained
