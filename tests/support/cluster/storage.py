"""A default StorageClass whose volumes are local folders, with its provisioner."""

import logging
from pathlib import Path

from cluster.api import Api, ApiError, Failure, Json

logger = logging.getLogger(__name__)

CLASS = "folders"
PROVISIONER = "bamboo.dev/folders"
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"


async def create_class(api: Api) -> None:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    body = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "provisioner": PROVISIONER,
        "metadata": {"name": CLASS, "annotations": annotations},
    }
    await api.request("POST", "/apis/storage.k8s.io/v1/storageclasses", body)


async def provision(api: Api, folder: Path) -> None:
    """Create a volume for each unbound claim of the class, forever. The controller manager binds claim and volume."""
    async for kind, claims in api.watch(CLAIMS):
        for claim in claims:
            waits = claim["spec"].get("storageClassName") == CLASS and not claim["spec"].get("volumeName")
            if kind != "DELETED" and waits:
                await _create(api, folder, claim)


async def _create(api: Api, folder: Path, claim: Json) -> None:
    meta, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{meta['uid']}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    reference = {"kind": "PersistentVolumeClaim", "apiVersion": "v1"}
    reference |= {key: meta[key] for key in ("namespace", "name", "uid")}
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Delete",
            "claimRef": reference,
            "hostPath": {"path": str(folder / name)},
        },
    }
    try:
        await api.request("POST", VOLUMES, body)
    except Failure as error:
        if not (isinstance(error, ApiError) and error.code == 409):
            logger.warning("volume for %s/%s: %r", meta["namespace"], meta["name"], error)
