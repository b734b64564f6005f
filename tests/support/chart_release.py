"""A Helm release of Bamboo's chart on a test cluster.

A cluster whose nodes are processes has no Services and no DNS. By default the operator therefore serves its workers at
a loopback address of its own. It serves metrics and health at its pod's address.
"""

import base64
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bamboo_core.names import WORKERS_PORT
from cluster.client import Client, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from helm_kit import CHART, Helm, chart_for
from waiting import until

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/bamboojobs.bamboo.dev"
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
WAIT = ("--wait", "--timeout", "300s")
GONE_SECONDS = 120  # owned objects go a little later than their owners


class Release:
    """A Helm release. major: Helm's major version. values: the chart's values; None or {}: values for process nodes."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        folder: Path,
        name: str = "bamboo",
        major: str = "4",
        values: Json | None = None,
        chart: Path = CHART,
    ) -> None:
        self.cluster, self.api, self.namespace, self.name = cluster, cluster.api, namespace, name
        self.helm = Helm(folder, cluster.kubeconfig, major)
        self.chart = chart_for(cluster.minor, folder, chart)
        # Helm 4 applies on the server, which in 1.20 takes it less well
        old = major == "4" and cluster.minor < OLDEST_SUPPORTED
        self._flags = ("--namespace", namespace, *(("--server-side=false",) if old else ()))
        address = f"127.253.{random.randrange(1, 250)}.{random.randrange(1, 250)}"
        self.url = f"wss://{address}:{WORKERS_PORT}"
        self.values: Json = values or {
            "listenAddress": address,
            "url": self.url,
            "tls": {"ipAddresses": [address]},
            "env": [POD_IP],
            "extraArgs": ["--web-listen=$(POD_IP):8080"],
        }

    def install(self, **values: Any) -> str:
        return self._apply("install", values)

    def upgrade(self, **values: Any) -> str:
        return self._apply("upgrade", values)

    def upgrade_or_install(self, *more: str) -> str:
        flags = (*self._flags, "--install", *more, *WAIT)
        return self.helm.run("upgrade", self.name, str(self.chart), *flags, values=self.values)

    def _apply(self, verb: str, values: Mapping[str, Any]) -> str:
        flags = (*self._flags, *(("--create-namespace",) if verb == "install" else ()), *WAIT)
        return self.helm.run(verb, self.name, str(self.chart), *flags, values=merged(self.values, values))

    def rollback(self, revision: int) -> None:
        self.helm.run("rollback", self.name, str(revision), *self._flags, *WAIT)

    def uninstall(self) -> str:
        return self.helm.run("uninstall", self.name, "--namespace", self.namespace, *WAIT)

    @property
    def full_name(self) -> str:
        return f"{self.name}-operator"

    def secret(self, suffix: str) -> dict[str, bytes]:
        found = self.api.get(f"/api/v1/namespaces/{self.namespace}/secrets/{self.full_name}-{suffix}")
        return {name: base64.b64decode(value) for name, value in found["data"].items()}

    def pod(self) -> Json:
        """Return the operator's pod. Raises ValueError unless exactly one exists."""
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        (found,) = self.api.get(pods, labelSelector=f"app.kubernetes.io/instance={self.name}")["items"]
        pod: Json = found
        return pod

    def said(self) -> str:
        """Return the operator's log."""
        return self.cluster.logs(self.namespace, self.pod()["metadata"]["name"])

    def leftovers(self) -> list[str]:
        """Return all objects of the release, of any kind, as "KIND NAMESPACE/NAME"."""
        selectors = (f"app.kubernetes.io/instance={self.name}", f"owner=helm,name={self.name}")
        return [found for selector in selectors for found in labelled(self.api, selector)]

    def until_gone(self, allowed: Callable[[str], bool] = lambda _: False) -> None:
        """Wait until its objects are gone, except two Secrets that the chart keeps and names that `allowed` accepts."""
        kept = {f"Secret {self.namespace}/{self.full_name}-{suffix}" for suffix in ("ca", "key")}

        def left() -> list[str]:
            return [name for name in self.leftovers() if name not in kept and not allowed(name)]

        until(lambda: not left(), GONE_SECONDS, left)


Install = Callable[..., Release]  # makes one, of a name of its own


@contextmanager
def no_crd(api: Client) -> Iterator[None]:
    """Delete the CRD before and after the block, since other tests install their own."""
    remove_crd(api)
    try:
        yield
    finally:
        remove_crd(api)


def remove_crd(api: Client) -> None:
    api.delete(CRD)
    api.wait(CRD, lambda found: not found)


def labelled(api: Client, selector: str) -> list[str]:
    """Return "KIND NAMESPACE/NAME" of all objects that match a label selector, of any kind.

    A kind or API group that is deleted between two requests counts as having no objects.
    """
    versions = ["/api/v1", *(f"/apis/{g['preferredVersion']['groupVersion']}" for g in api.get("/apis")["groups"])]
    found = []
    for version in versions:
        for resource in (api.find(version) or {"resources": ()})["resources"]:
            if "list" not in resource["verbs"] or "/" in resource["name"]:
                continue
            listed = api.find(f"{version}/{resource['name']}", labelSelector=selector) or {"items": ()}
            places = [(o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in listed["items"]]
            found += [f"{resource['kind']} {namespace}/{name}" for namespace, name in places]
    return sorted(set(found))


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Json:
    """Return `one` overridden by `other`, as Helm merges values: maps key by key, other values as a whole."""
    result = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result
