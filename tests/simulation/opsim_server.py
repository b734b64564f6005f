"""An API server for the operator's simulation, with late answers, lost answers and watches."""

import asyncio
import base64
import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from bamboo_core.kube.api import JSON
from bamboo_core.kube.errors import ApiError, ClusterUnreachable
from bamboo_core.names import LABEL_JOB_UID, TOKEN_AUDIENCE
from bamboo_operator.auth.pod_tokens import POD_NAME, POD_UID
from opsim_loop import VirtualLoop

Object = dict[str, Any]
Changed = Callable[[str, Object], None]  # such as "pods ADDED" (MODIFIED, DELETED), and the object
PLACE = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(/status)?")


def merged(before: Any, patch: Object) -> Object:
    """Return the object after a merge patch of RFC 7396."""
    after = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        after[key] = merged(after.get(key), value) if isinstance(value, dict) else value
    return {key: value for key, value in after.items() if value is not None}


def refusal(status: int, reason: str, name: str = "") -> ApiError:
    return ApiError(status, reason, f"{name} {reason}".strip())


class Watch:
    """The server's objects of one kind, and the operator's watch of them.

    show: called with the type of a change (None for a listed object) and the object, in the order of its changes.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, show: Callable[[str | None, Object], None]) -> None:
        self._loop, self._rng, self._show = loop, rng, show
        self.objects: dict[tuple[str, str], Object] = {}
        self._latest: dict[str, float] = {}  # by uid: the time of the last notification
        self._connection = 0
        self.listening = False

    def changed(self, kind: str | None, thing: Object) -> None:
        """Schedule the notification of a change if the watch is on. Changes of one object keep their order."""
        if not self.listening:
            return
        uid, when = thing["metadata"]["uid"], self._loop.time() + 10 ** self._rng.uniform(-3, -0.3)
        self._latest[uid] = max(self._latest.get(uid, 0.0) + 1e-4, when)
        self._loop.call_at(self._latest[uid], self._tell, kind, copy.deepcopy(thing), self._connection)

    def _tell(self, kind: str | None, thing: Object, connection: int) -> None:
        if connection == self._connection:
            self._show(kind, thing)

    def interrupt(self, seconds: float) -> None:
        """Turn the watch off if it is on, and list all objects after `seconds`."""
        if self.listening:
            self.listening = False
            self._loop.call_later(seconds, self.list, self._connection)

    def list(self, connection: int | None = None) -> None:
        """Turn the watch on and show all objects, unless it is on or `forget` has ended this `connection`."""
        if not self.listening and connection in (None, self._connection):
            self.listening = True
            for thing in self.objects.values():
                self.changed(None, thing)

    def forget(self) -> None:
        """Turn the watch off and drop its pending notifications, since the operator has ended."""
        self.listening = False
        self._connection += 1


class Server:
    """A simulated API server: the objects of a cluster, and the requests about them.

    room: the most pods that a quota allows. changed: called with each change of pods, nodes and jobs, and with budgets
    that are written. called: called with method and path before each request but GETs, status writes and token reviews.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        watches: Mapping[str, Watch],
        changed: Changed,
        called: Callable[[str, str], None] | None = None,
    ) -> None:
        self._loop, self._rng, self._watches, self._changed, self._called = loop, rng, watches, changed, called
        self._made = self._version = 0
        self.names: set[tuple[str, str]] = set()  # of pods that this operator has made, with their jobs' uids
        self.room = 1000
        self.revisions: dict[str, Object] = {}  # by name
        self.budgets: dict[str, Object] = {}  # their specs by name
        self.admission: Callable[[Object], Object] = dict  # what webhooks make of a new pod, or its refusal
        self._removed: set[str] = set()  # uids of pods that are gone but for a finalizer
        self.trouble = 0.0  # the part of calls that fail
        self.slowness = 1.0

    # for clients

    async def call(
        self,
        method: str,
        place: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> Object:
        """Answer a request with delays. Raises RemoteError if it is refused, or randomly before or after its effect."""
        if self._called and method != "GET" and not place.endswith(("/status", "/tokenreviews")):
            self._called(method, place)
        await asyncio.sleep(self.slowness * 10 ** self._rng.uniform(-3.5, -1.5))
        fails = self._rng.random() < self.trouble
        if fails and self._rng.random() < 0.6:
            raise self._rng.choice((refusal(503, "down"), refusal(429, "busy"), ClusterUnreachable("reset")))
        found = copy.deepcopy(self.act(method, place, body, query or {}))
        await asyncio.sleep(self.slowness * 10 ** self._rng.uniform(-3.5, -1.5))
        if fails:
            raise ClusterUnreachable("no answer came")
        return found

    def act(self, method: str, place: str, body: Object | None, query: Mapping[str, str]) -> Object:
        parts = PLACE.fullmatch(place)
        assert parts, place
        namespace, kind, name, status = parts.groups()
        if kind == "events" and method == "GET":
            return {"items": []}
        if kind == "events":
            self._made += 1
            return {**(body or {}), "metadata": {"name": f"event-{self._made}"}}
        if kind == "tokenreviews":
            assert body
            return {"status": self._review(body["spec"]["token"])}
        if kind == "networkpolicies":
            return body or {}
        if kind == "poddisruptionbudgets":
            return self._budget(method, name or "", body)
        if kind == "controllerrevisions":
            return self._revision(method, name, body, query)
        if method == "POST":
            assert body
            return self._create(kind, body, dry_run="dryRun" in query)
        if method == "GET" and name is None:
            wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
            there = self._watches[kind].objects.items()
            return {"items": [one for (of, n), one in there if namespace in (None, of) and wanted in ("", n)]}
        thing = self._watches[kind].objects.get((namespace or "", name))
        if thing is None:
            raise refusal(404, "NotFound", name)
        if method == "GET":
            return thing
        assert body
        uid = (body.get("preconditions") or body.get("metadata") or {}).get("uid")
        if uid not in (None, thing["metadata"]["uid"]):
            raise refusal(409, "Conflict", name)
        if status:
            thing["status"] = merged(thing.get("status") or {}, body["status"])
            self.modified(kind, thing)
        elif method == "DELETE":
            self.delete(kind, thing)
        return thing

    def _budget(self, method: str, name: str, body: Object | None) -> Object:
        if method == "DELETE":
            if self.budgets.pop(name, None) is None:
                raise refusal(404, "NotFound", name)
            return {}
        assert body
        self.budgets[name] = copy.deepcopy(body["spec"])
        self._changed("poddisruptionbudgets MODIFIED", {"metadata": {"uid": "", **body["metadata"]}})
        return body

    def _revision(self, method: str, name: str | None, body: Object | None, query: Mapping[str, str]) -> Object:
        """Handle a request about ControllerRevisions. They outlive their job, since no garbage collector runs here."""
        if method == "GET":
            uid = query["labelSelector"].partition("=")[2]
            return {"items": [r for r in self.revisions.values() if r["metadata"]["labels"][LABEL_JOB_UID] == uid]}
        if method == "DELETE":
            if self.revisions.pop(name or "", None) is None:
                raise refusal(404, "NotFound", name or "")
            return {}
        assert body
        body = json.loads(body) if isinstance(body, str) else body  # as YAML
        if body["metadata"]["name"] in self.revisions:
            raise refusal(409, "AlreadyExists", body["metadata"]["name"])
        self.revisions[body["metadata"]["name"]] = copy.deepcopy(body)
        return body

    def _create(self, kind: str, body: Object, *, dry_run: bool) -> Object:
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if key in self._watches[kind].objects:
            raise refusal(409, "AlreadyExists", key[1])
        if kind == "pods" and len(self._watches[kind].objects) >= self.room:
            raise refusal(403, "exceeded quota")
        if kind == "pods":
            body = self.admission(body)
        return body if dry_run else self.create(kind, body)

    def _review(self, token: str) -> Object:
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))["kubernetes.io"]
        pod = self._watches["pods"].objects.get((claims["namespace"], claims["pod"]["name"]))
        if pod is None or pod["metadata"]["uid"] != claims["pod"]["uid"]:
            return {"authenticated": False}
        names = {POD_NAME: [claims["pod"]["name"]], POD_UID: [claims["pod"]["uid"]]}
        user = {"username": f"system:serviceaccount:{claims['namespace']}:default", "extra": names}
        return {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user}

    # for the parts of the cluster

    def create(self, kind: str, body: Object) -> Object:
        self._made += 1
        thing = copy.deepcopy(body)
        stamp = self._loop.date().strftime("%Y-%m-%dT%H:%M:%SZ")
        thing["metadata"] |= {"uid": f"uid-{self._made}", "creationTimestamp": stamp, "generation": 1}
        if kind == "pods":
            thing["status"] = {"phase": "Pending"}
            name = (thing["metadata"]["ownerReferences"][0]["uid"], thing["metadata"]["name"])
            if name in self.names:
                raise AssertionError(f"a pod of that name was made before: {name}")
            self.names.add(name)
        self._watches[kind].objects[thing["metadata"].get("namespace", ""), thing["metadata"]["name"]] = thing
        self._tell(kind, "ADDED", thing)
        return thing

    def modified(self, kind: str, thing: Object) -> None:
        self._tell(kind, "MODIFIED", thing)

    def delete(self, kind: str, thing: Object) -> None:
        """Delete an object: mark a pod that has a node, for its kubelet to remove; `remove` any other object."""
        if kind == "pods" and thing["spec"].get("nodeName"):
            self._mark(thing, 30)
        else:
            self.remove(kind, thing)

    def _mark(self, pod: Object, seconds: int) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"] |= {"deletionTimestamp": self._later(seconds), "deletionGracePeriodSeconds": seconds}
            self.modified("pods", pod)

    def delete_in_foreground(self, job: Object) -> None:
        """Mark a job as deleted in the foreground: it stays until its pods are gone."""
        job["metadata"] |= {"deletionTimestamp": self._later(0), "finalizers": ["foregroundDeletion"]}
        self.modified("bamboojobs", job)

    def remove(self, kind: str, thing: Object) -> None:
        """Remove an object at once; a pod with a finalizer stays until the finalizer is removed."""
        if kind == "pods" and thing["metadata"].get("finalizers"):
            self._removed.add(thing["metadata"]["uid"])
            self._mark(thing, 0)
            return
        key = (thing["metadata"].get("namespace", ""), thing["metadata"]["name"])
        if self._watches[kind].objects.get(key) is thing:
            del self._watches[kind].objects[key]
            self._tell(kind, "DELETED", thing)

    def finalize(self, pod: Object, finalizer: str) -> None:
        """Remove one finalizer from a pod, and then the pod if `remove` had left it only because of its finalizers."""
        pod["metadata"]["finalizers"] = [one for one in pod["metadata"]["finalizers"] if one != finalizer]
        if pod["metadata"]["uid"] in self._removed:
            self.remove("pods", pod)
        else:
            self.modified("pods", pod)

    def _later(self, seconds: float) -> str:
        return (self._loop.date() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _tell(self, kind: str, change: str, thing: Object) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._watches[kind].changed(change, thing)
        self._changed(f"{kind} {change}", thing)


def token_of(pod: Object) -> str:
    """Return a pod's token as a kubelet projects it, but unsigned."""
    metadata = pod["metadata"]
    about = {"namespace": metadata["namespace"], "pod": {"name": metadata["name"], "uid": metadata["uid"]}}
    claims = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": about}).encode()).decode().rstrip("=")
    return f"head.{claims}.signature"
