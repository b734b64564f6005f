"""What an API server keeps, and when it refuses: the part that all tests which play one have in common."""

import copy
from typing import Any

from bamboo_core.kube.errors import ApiError

Object = dict[str, Any]


class FakeApi:
    """Objects by kind and name. Each change gives a new resourceVersion; answers are copies."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Object]] = {}
        self._version = 0

    def all(self, kind: str) -> dict[str, Object]:
        """The objects by name, as they are kept: who plays the cluster may change them."""
        return self._kept.setdefault(kind, {})

    def put(self, kind: str, thing: Object) -> Object:
        """Whatever was there; returns what is kept now."""
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
        """Replaces an object if it is still the version that the new one was made from. Raises ApiError if it
        is not.
        """
        before = self._there(kind, thing["metadata"]["name"])
        if thing["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        return copy.deepcopy(self.put(kind, thing))

    def _there(self, kind: str, name: str) -> Object:
        if name not in self.all(kind):
            raise ApiError(404, "NotFound", f"there is no {kind} {name}")
        return self.all(kind)[name]
