"""A pod's volumes as local folders."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.api import Api
from cluster.children import Mount
from cluster.environment import Read, Unknown, contents, pod_field

Json = dict[str, Any]
Files = dict[str, tuple[bytes, int]]  # content and mode by relative path
FILES_OF = ("configMap", "secret", "projected")
TOKEN_SECONDS = 24 * 3600  # no token is renewed


@dataclass(slots=True, kw_only=True)
class Volumes:
    api: Api
    read: Read
    pod: Json  # kept up to date by the owner
    folder: Path  # of this pod alone
    paths: dict[str, Path] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Create or find all volumes; write their files. Raises Unknown if one is unsupported or lacks its source."""
        for volume in self.pod["spec"].get("volumes", []):
            self.paths[volume["name"]] = await self._path(volume)

    def mounts(self, container: Json) -> list[Mount]:
        found = [
            Mount(source=self.paths[entry["name"]], target=entry["mountPath"], read_only=entry.get("readOnly", False))
            for entry in container.get("volumeMounts", [])
        ]
        return sorted(found, key=lambda mount: mount.target.count("/"))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _path(self, volume: Json) -> Path:
        if "hostPath" in volume:
            return _host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            return await self._claim(volume["persistentVolumeClaim"]["claimName"])
        path: Path = self.folder / "volumes" / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        kind = next((kind for kind in FILES_OF if kind in volume), None)
        if kind:
            write(path, await self._files(kind, volume[kind]))
        elif "emptyDir" not in volume:
            raise Unknown(f"the test cluster has no volumes of this type: {sorted(volume)}")
        return path

    async def _claim(self, name: str) -> Path:
        claim = await self.read("persistentvolumeclaims", name)
        bound = (claim or {}).get("spec", {}).get("volumeName")
        if not bound:
            raise Unknown(f'persistentvolumeclaim "{name}" is not bound')
        spec = (await self.api.get(f"/api/v1/persistentvolumes/{bound}"))["spec"]
        return _host_path({"type": "DirectoryOrCreate", **(spec.get("hostPath") or spec["local"])})

    async def _files(self, kind: str, source: Json, mode: int = 0o644) -> Files:
        mode = source.get("defaultMode") or mode
        if kind == "projected":
            found: Files = {}
            for part in source["sources"]:
                (name, inner), *_ = part.items()
                if name == "serviceAccountToken":
                    found[inner["path"]] = (await self._token(inner), 0o600)
                else:
                    found |= await self._files(name, inner, mode)
            return found
        if kind == "downwardAPI":
            return {item["path"]: (pod_field(self.pod, item).encode(), mode) for item in source["items"]}
        data = await contents("configmaps" if kind == "configMap" else "secrets", source, self.read)
        if "items" not in source:
            return {name: (content, mode) for name, content in data.items()}
        if missing := {item["key"] for item in source["items"]} - data.keys():
            raise Unknown(f"{kind} {source.get('name') or source['secretName']} has no {', '.join(sorted(missing))}")
        return {item["path"]: (data[item["key"]], item.get("mode") or mode) for item in source["items"]}

    async def _token(self, source: Json) -> bytes:
        meta, account = self.pod["metadata"], self.pod["spec"].get("serviceAccountName", "default")
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        spec: Json = {"expirationSeconds": TOKEN_SECONDS, "boundObjectRef": bound}
        if audience := source.get("audience"):
            spec["audiences"] = [audience]
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        answer = await self.api.request("POST", path, {"spec": spec})
        token: str = answer["status"]["token"]
        return token.encode()


def reader(api: Api, namespace: str) -> Read:
    async def read(kind: str, name: str) -> Json | None:
        return await api.find(f"/api/v1/namespaces/{namespace}/{kind}/{name}")

    return read


def _host_path(source: Json) -> Path:
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise Unknown(f"hostPath {path} does not exist")
    return path


def write(folder: Path, files: Files) -> None:
    """Write a volume's files, replacing files of the same names."""
    for name, (content, mode) in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
