"""What kopf keeps of what it watches."""

import asyncio
from typing import Any, cast

import kopf
from kopf._core.actions.lifecycles import all_at_once
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from bamboo_operator.jobs.controller import JobController
from bamboo_operator.watch_handlers import kopf_settings, watch_handlers
from watched_api_kit import Server, sharing


class Uncopied(dict[str, Any]):
    """A part of an object of which nobody needs a copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("it was copied")


async def test_kopf_copies_nothing_of_what_it_watches() -> None:
    """To find out what has changed, which no handler asks, it would copy every object at each of its events."""
    taints = [{"key": "going", "effect": "NoSchedule"}]
    metadata = {"name": "node-1", "uid": "u", "managedFields": Uncopied()}
    node = {"type": "MODIFIED", "object": {"metadata": metadata, "spec": Uncopied(taints=taints)}}
    async with sharing(Server()) as shared:
        jobs = JobController(shared)
        handlers, indexers = watch_handlers(jobs, shared), OperatorIndexers()
        indexers.ensure(handlers._indexing.get_all_handlers())
        await process_resource_event(
            lifecycle=all_at_once,
            indexers=indexers,
            registry=handlers,
            settings=kopf_settings(),
            memories=ResourceMemories(),
            memobase=kopf.Memo(),
            resource=kopf.Resource("", "v1", "nodes"),
            event_queue=asyncio.Queue(),
            raw_event=cast(Any, node),
        )
        await jobs.stop()
    assert shared.cluster.nodes["node-1"]["spec"]["taints"] == taints
    assert shared.counts.watched == {"node": 1}
