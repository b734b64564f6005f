"""Tenants, and jobs that want workers."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from hypothesis import strategies as st

from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.request_parts import Object
from bamboo_operator.tenants.demand import JobDemand
from bamboo_operator.tenants.tenant_list import TenantList, parse_tenants


class ConfigMaps:
    """Those of an API server. refusing: what each call is answered with instead. late: writes are done only when
    `arrive` is called, and not answered.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Object] = {}
        self.refusing: ApiError | None = None
        self.too_long = False  # whatever is written
        self.late = False
        self.writes = 0
        self._delayed: list[Callable[[], Object]] = []
        self._version = 0

    async def read_config_map(self, namespace: str, name: str) -> Object | None:
        if self.refusing:
            raise self.refusing
        return copy.deepcopy(self.kept.get(name))

    async def create_config_map(self, config_map: Object) -> Object:
        return self._answer(partial(self._create, config_map))

    async def patch_config_map(self, namespace: str, name: str, data: Mapping[str, str | None], version: str) -> Object:
        return self._answer(partial(self._patch, name, data, version))

    def arrive(self) -> None:
        """What was late is done, or refused."""
        for write in self._delayed:
            with contextlib.suppress(ApiError):
                write()
        self._delayed.clear()

    def _answer(self, write: Callable[[], Object]) -> Object:
        if self.late:
            self._delayed.append(write)
            raise TimeoutError
        return write()

    def _create(self, config_map: Object) -> Object:
        if (name := config_map["metadata"]["name"]) in self.kept:
            raise ApiError(409, "AlreadyExists", name)
        return self._store(name, config_map["data"])

    def _patch(self, name: str, data: Mapping[str, str | None], version: str) -> Object:
        self.writes += 1
        if name not in self.kept:
            raise ApiError(404, "NotFound", name)
        if version != self.kept[name]["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", name)
        if self.too_long:
            raise ApiError(422, "Invalid", "must have at most 1048576 bytes")
        return self._store(name, {**self.kept[name]["data"], **data})

    def _store(self, name: str, data: Mapping[str, str | None]) -> Object:
        self._version += 1
        kept = {key: value for key, value in data.items() if value is not None}
        self.kept[name] = {"metadata": {"name": name, "resourceVersion": str(self._version)}, "data": kept}
        return copy.deepcopy(self.kept[name])


def tenants(*listed: dict[str, Any], **more: Any) -> TenantList:
    return parse_tenants({"format": "bamboo-tenants", "version": 1, "tenants": list(listed), **more})


def job(name: str, **more: Any) -> JobDemand:
    """A job of 4 stages that has nothing yet, and would have two pipelines."""
    namespace = name.partition("/")[0]
    return JobDemand(**{"name": name, "namespace": namespace, "made": 0.0, "fewest": 4, "step": 4, "most": 8} | more)


def running(name: str, workers: int, **more: Any) -> JobDemand:
    """A job whose grid runs with so many workers."""
    return job(name, **{"begun": True, "runs": True, "pods": workers, "placed": workers} | more)


def waiting(name: str, **more: Any) -> JobDemand:
    """A job of whose pods none finds a node."""
    return job(name, **{"pods": 4, "wanting": 4, "lacks_nodes": True} | more)


@st.composite
def any_job(draw: st.DrawFn, number: int) -> JobDemand:
    namespace, step = draw(st.sampled_from("abc")), draw(st.integers(1, 4))
    fewest = step * draw(st.integers(1, 2))
    most, begun = fewest + draw(st.integers(0, 8)), draw(st.booleans())
    pods = draw(st.integers(0, most))
    placed = draw(st.integers(0, pods))
    return JobDemand(
        name=f"{namespace}/job-{number}",
        namespace=namespace,
        made=draw(st.integers(0, 5)),
        fewest=fewest,
        step=step,
        most=most,
        devices=draw(st.integers(1, 3)),
        price=Decimal(draw(st.integers(0, 5))),
        pods=pods,
        placed=placed,
        wanting=most - placed,
        begun=begun,
        runs=begun and draw(st.booleans()),
        broken=draw(st.integers(0, 2)),
        harm=draw(st.sampled_from(("", "one more loss ends it"))),
        nodes=draw(st.sampled_from(("", "spot"))),
        lacks_nodes=draw(st.booleans()),
    )


@st.composite
def any_jobs(draw: st.DrawFn) -> list[JobDemand]:
    return [draw(any_job(number)) for number in range(draw(st.integers(1, 6)))]


any_tenants = st.builds(
    lambda workers, devices, money, each, weight: tenants(
        {
            "name": "first",
            "namespaces": ["a", "b"],
            "weight": weight,
            "most": {"workers": workers, "devices": devices, "moneyPerHour": str(money)},
            "mostPerJob": {"workers": each},
        }
    ),
    st.integers(1, 30),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(1, 3),
)
