"""Which of a job's pods are out of date, and of what more workers like those that train can be made."""

from dataclasses import replace
from typing import Any

from bamboo_core.job.placement_spec import WorkerSpec
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_WORKER_SPEC
from bamboo_operator.pods.rollouts.worker_templates import WorkerTemplates
from operator_kit import META, SETTINGS, job

POOLS = [{"name": "spot", "capacity": "Spot"}, {"name": "sure", "capacity": "OnDemand", "afterSeconds": 60}]
OLD, NEW = (job(nodePools=POOLS, worker={"image": image}) for image in ("trainer:1", "trainer:2"))


def templates(*, kept: bool = False) -> WorkerTemplates:
    """kept: the sections that pods were made of are known."""
    sections: dict[str, WorkerSpec] = {}
    if kept:
        for spec in (OLD, NEW):
            sections[made(spec, 0)["metadata"]["labels"][LABEL_WORKER_SPEC]] = spec.worker
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
