"""Which of a job's pods are out of date, and of what more workers like those that train can be made."""

from dataclasses import replace
from typing import Any

from bamboo_core.job.edits import PodSections
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_WORKER_SPEC
from bamboo_operator.pods.rollouts.worker_templates import WorkerTemplates
from operator_kit import META, SETTINGS, job, trainer

POOLS = [{"name": "spot", "capacity": "Spot"}, {"name": "sure", "capacity": "OnDemand", "afterSeconds": 60}]
OLD, NEW = (job(nodePools=POOLS, worker={"image": image}) for image in ("trainer:1", "trainer:2"))


def templates(*, kept: bool = False) -> WorkerTemplates:
    """kept: the sections that pods were made of are known."""
    sections: dict[str, PodSections] = {}
    if kept:
        for spec in (OLD, NEW):
            sections[made(spec, 0)["metadata"]["labels"][LABEL_WORKER_SPEC]] = PodSections.of(spec)
    return WorkerTemplates(META, SETTINGS, sections.get)


def made(spec: JobSpec, number: int, pool: int | None = 0) -> dict[str, Any]:
    pools = spec.node_pools
    return (
        WorkerTemplates(META, SETTINGS, lambda _: None).newest(spec).pod(number, None if pool is None else pools[pool])
    )


def test_a_pod_is_out_of_date_if_it_would_be_made_differently_now() -> None:
    found = templates()
    for pool in (0, 1, None):
        assert found.is_newest(OLD, made(OLD, 0, pool))
        assert not found.is_newest(NEW, made(OLD, 0, pool))
    assert not found.is_newest(OLD, {"metadata": {"labels": None}})


def test_a_pod_of_a_pool_that_is_gone_is_out_of_date() -> None:
    fewer = replace(OLD, node_pools=OLD.node_pools[:1])
    assert not templates().is_newest(fewer, made(OLD, 0, 1))
    assert templates().is_newest(fewer, made(OLD, 0, 0))


def test_more_workers_like_the_newest_of_these_are_made_of_its_section() -> None:
    pods = {"w3": made(OLD, 3), "w12": made(NEW, 12)}
    assert templates(kept=True).of(OLD, pods).job.worker == NEW.worker
    assert templates(kept=True).of(NEW, {"w3": pods["w3"]}).job.worker == OLD.worker


def test_without_the_section_that_of_now_is_taken() -> None:
    assert templates().of(NEW, {"w3": made(OLD, 3)}).job.worker == NEW.worker


def test_the_name_for_people_is_that_of_the_first_pools_pods() -> None:
    known = templates()
    revisions = known.newest(OLD).revisions()
    assert set(revisions) == {None, "spot", "sure"}
    assert known.revision(OLD) == revisions["spot"]
    assert known.revision(job()) == known.newest(job()).revisions()[None]


def of_pools(*images: str | None) -> JobSpec:
    """A job whose two pools have templates with these images, if any."""
    named = zip(POOLS, images, strict=True)
    own = ({"spec": {"containers": [{"name": "trainer", "image": image}]}} if image else None for image in images)
    return job(nodePools=[pool | ({"template": t} if t else {}) for (pool, _), t in zip(named, own, strict=True)])


def test_an_edit_of_a_pools_template_is_of_that_pools_pods_only() -> None:
    before, after = of_pools("a:1", "b:1"), of_pools("a:1", "b:2")
    known = templates()
    assert known.is_newest(after, made(before, 0, 0))
    assert not known.is_newest(after, made(before, 0, 1))


def test_more_workers_like_old_ones_have_their_pools_template_as_it_was() -> None:
    before, after = of_pools(None, "b:1"), of_pools("a:2", "b:2")
    digest = made(before, 3, 1)["metadata"]["labels"][LABEL_WORKER_SPEC]
    known = WorkerTemplates(META, SETTINGS, {digest: PodSections.of(before)}.get)
    running = {"status": {"phase": "Running"}}
    pods = {"w2": made(before, 2, 0) | running, "w3": made(before, 3, 1) | running}
    old = known.of(after, pods)
    images = [trainer(old.pod(7, pool))["image"] for pool in after.node_pools]
    assert images == ["trainer:1", "b:1"]
