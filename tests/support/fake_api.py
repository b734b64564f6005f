"""A fake Kubernetes API: objects in memory, and refusals as `ApiError`."""

import copy
from typing import Any

from bamboo_core.kube.errors import ApiError

Object = dict[str, Any]


class FakeApi:
    """A store of objects by kind and name. `put` sets a new resourceVersion; create, read and replace return copies."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Object]] = {}
        self._version = 0

    def all(self, kind: str) -> dict[str, Object]:
        """Return the stored objects of a kind by name; the test may change them in place."""
        return self._kept.setdefault(kind, {})

    def put(self, kind: str, thing: Object) -> Object:
        """Store a copy of the object, in place of an older one with its name, and return the copy."""
        self._version += 1
        kept = copy.deepcopy(thing)
        kept["metadata"]["resourceVersion"] = str(self._version)
        self.all(kind)[kept["metadata"]["name"]] = kept
        return kept

    def refuse_taken(self, kind: str, name: str) -> None:
        if name in self.all(kind):
            raise ApiError(409, "AlreadyExists", f"{kind} {name} exists")

    def create(self, kind: str, thing: Object) -> Object:
        self.refuse_taken(kind, thing["metadata"]["name"])
        return copy.deepcopy(self.put(kind, thing))

    def read(self, kind: str, name: str) -> Object:
        return copy.deepcopy(self._there(kind, name))

    def replace(self, kind: str, thing: Object) -> Object:
        """Replace an object if the new one was made from its current version. Raises ApiError otherwise."""
        before = self._there(kind, thing["metadata"]["name"])
        if thing["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        return copy.deepcopy(self.put(kind, thing))

    def _there(self, kind: str, name: str) -> Object:
        if name not in self.all(kind):
            raise ApiError(404, "NotFound", f"there is no {kind} {name}")
        return self.all(kind)[name]
