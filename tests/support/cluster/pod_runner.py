"""The runner of one pod, whose containers are local processes."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import children, pod_status
from cluster.api import STRATEGIC, Api, ApiError, Failure, Json
from cluster.container import message, start
from cluster.environment import Unknown
from cluster.pod_status import Record
from cluster.preloaded import Preloaded
from cluster.volumes import Volumes, reader

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The addresses and variables that a node gives a pod, and the starter of its containers (preloaded)."""

    pod_ip: str
    host_ip: str
    env: Mapping[str, str]
    preloaded: Preloaded


class PodRunner:
    """The runner of one pod. run() starts its containers and returns when the pod has ended; cancelling it kills the
    pod's processes.
    """

    def __init__(self, api: Api, pod: Json, place: Place, folder: Path, logs: Path) -> None:
        self.api, self.pod, self.place, self.folder, self.logs = api, pod, place, folder, logs
        self.children: dict[str, children.Child] = {}
        self.over = False
        self._facts: Json = {
            "podIP": place.pod_ip,
            "podIPs": [{"ip": place.pod_ip}],
            "hostIP": place.host_ip,
            "startTime": pod_status.now(),
        }
        self._volumes = Volumes(
            api=api, read=reader(api, pod["metadata"]["namespace"]), pod=self._known(), folder=folder
        )
        self._init = _records(pod, "initContainers")
        self._records = _records(pod, "containers")
        self._stopping, self._changed = asyncio.Event(), asyncio.Event()
        self._publishing = asyncio.Lock()
        self._kill_at: float | None = None
        self._helpers: list[asyncio.Task[None]] = []

    @property
    def path(self) -> str:
        meta = self.pod["metadata"]
        return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"

    async def run(self) -> None:
        self._help(self._publish_changes())
        try:
            await self._live()
            self.over = True
            await self._publish()
            if self._stopping.is_set():
                await remove(self.api, self.pod)
        finally:
            self.kill()
            for helper in self._helpers:
                helper.cancel()
            self._volumes.remove()

    def update(self, pod: Json) -> None:
        """Accept the pod's newest version, and stop the pod if it is being deleted."""
        self.pod = pod
        self._volumes.pod = self._known()
        if "deletionTimestamp" in pod["metadata"]:
            self.stop(pod["metadata"].get("deletionGracePeriodSeconds", 30))

    def stop(self, seconds: float) -> None:
        """Send SIGTERM to the containers' first processes, and SIGKILL to all processes after `seconds`. A later call
        may shorten the time.
        """
        kill_at = time.monotonic() + seconds
        if not self._stopping.is_set():
            self._stopping.set()
            for child in self.children.values():
                child.signal(signal.SIGTERM)
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
            self._help(self._kill_later(seconds))

    def kill(self) -> None:
        for child in self.children.values():
            if child.process.returncode is None:
                child.signal_group(signal.SIGKILL)

    async def _kill_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.kill()

    def _help(self, work: Any) -> None:
        self._helpers.append(asyncio.create_task(work))

    def _known(self) -> Json:
        return {**self.pod, "status": {**self.pod.get("status", {}), **self._facts}}

    async def _live(self) -> None:
        if not await self._prepare():
            return
        for container in self.pod["spec"].get("initContainers", []):
            record = self._init[container["name"]]
            await self._run_container(container, record)
            if record.exit_code != 0:
                return
        async with asyncio.TaskGroup() as group:
            for container in self.pod["spec"]["containers"]:
                group.create_task(self._run_container(container, self._records[container["name"]]))

    async def _prepare(self) -> bool:
        """Prepare the volumes, and retry until all exist. Return False if the pod is stopped first."""
        while not self._stopping.is_set():
            try:
                await self._volumes.prepare()
                return True
            except (Unknown, *Failure) as problem:
                self._changed.set()  # its containers are being created, and that is all that the status says
                logger.warning("volumes of %s: %s", self.path, problem)
            await self._pause(RETRY_SECONDS)
        return False

    async def _run_container(self, container: Json, record: Record) -> None:
        """Run a container to its end, once its variables are known. If the pod is stopped before the container starts,
        record exit code 137. The container is never restarted, whatever its policy; controllers replace ended pods.
        """
        while not self._stopping.is_set():
            try:
                return await self._run_process(container, record)
            except (Unknown, *Failure) as problem:
                record.wait("CreateContainerConfigError", str(problem))
            self._changed.set()
            await self._pause(RETRY_SECONDS)
        record.end(137, "ContainerStatusUnknown", "the pod was ended before this container started")

    async def _run_process(self, container: Json, record: Record) -> None:
        log, scratch = self.logs / f"{container['name']}.log", self.folder / container["name"] / "scratch"
        mounts = self._volumes.mounts(container)
        pod, extra = self._known(), self.place.env
        child = await start(pod, container, log, self.place.preloaded, extra=extra, mounts=mounts, scratch=scratch)
        self.children[container["name"]] = child
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        record.run(child.pid)
        self._changed.set()
        code = await child.wait()
        record.end(code, "Completed" if code == 0 else "Error", message(container, log, code))
        self._changed.set()

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the pod is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _publish_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:  # an older status must not arrive after a newer one
            await self._publish_until_taken()

    async def _publish_until_taken(self) -> None:
        while True:
            told = pod_status.status(
                list(self._records.values()), list(self._init.values()), over=self.over, facts=self._facts
            )
            body = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": told}
            try:
                await self.api.request("PATCH", f"{self.path}/status", body, content=STRATEGIC)
                return
            except ApiError as error:
                if error.code in (404, 409):
                    return  # the pod is gone, or another has its name
                logger.warning("status of %s: %s", self.path, error)
            except Failure as error:
                logger.warning("status of %s: %r", self.path, error)
            await asyncio.sleep(RETRY_SECONDS)


async def remove(api: Api, pod: Json) -> None:
    """Delete the API object of a pod whose processes have ended, without a grace period. No error if it is gone."""
    meta = pod["metadata"]
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
    try:
        await api.request("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", options)
    except ApiError as error:
        if error.code not in (404, 409):
            raise


def _records(pod: Json, kind: str) -> dict[str, Record]:
    found = pod["spec"].get(kind, [])
    return {container["name"]: Record(name=container["name"], image=container["image"]) for container in found}
