"""A job with an edited manifest, and a store of the ControllerRevisions that the operator has accepted."""

from copy import deepcopy
from typing import Any

from bamboo_core.kube.errors import ApiError, ClusterUnreachable
from manifest_kit import minimal

KEY = ("default", "tiny")


def edited(**changes: Any) -> dict[str, Any]:
    """Return a manifest with changed fields of its spec, merged into the existing ones."""
    document = deepcopy(minimal())
    document["metadata"] = {"name": "tiny", "namespace": "default"}
    for name, value in changes.items():
        there = document["spec"].get(name)
        document["spec"][name] = {**there, **value} if isinstance(there, dict) else value
    return document


class Revisions:
    """ControllerRevisions of a namespace. failing: names of calls that are refused."""

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {}
        self.failing: set[str] = set()

    async def list_revisions(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        uid = selector.partition("=")[2]
        return [r for r in self.there.values() if uid in r["metadata"]["labels"].values()]

    async def create_revision(self, revision: dict[str, Any]) -> None:
        if revision["metadata"]["name"] in self.there:
            raise ApiError(409, "AlreadyExists", "there")
        self.there[revision["metadata"]["name"]] = deepcopy(revision)
        if "create" in self.failing:
            raise ClusterUnreachable("late")

    async def delete_revision(self, namespace: str, name: str) -> None:
        if "delete" in self.failing:
            raise ClusterUnreachable("late")
        self.there.pop(name, None)
