"""An image archive with busybox and its libraries, which containerd imports without a registry."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

NOBODY = "root:x:0:0::/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n"


def write(path: Path, names: Sequence[str], busybox: Path, entrypoint: Sequence[str] = ("/bin/sh",)) -> Path:
    """Write the archive and return its path. names: the image's names, with tags. busybox: the program's path."""
    layer = _layer(busybox)
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[_machine()],
        "os": "linux",
        "config": {"Entrypoint": [*entrypoint], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [*names], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        _add(archive, "layer.tar", layer)
        _add(archive, "config.json", json.dumps(config).encode())
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def _layer(busybox: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            _add(layer, folder, mode=mode, kind=tarfile.DIRTYPE)
        _add(layer, "bin/busybox", busybox.read_bytes(), mode=0o755)
        for command in _said(str(busybox), "--list").split():
            if command != "busybox":
                _add(layer, f"bin/{command}", kind=tarfile.SYMTYPE, target="busybox")
        for library in re.findall(r"(/\S+) \(0x", _said("ldd", str(busybox))):
            _add(layer, library.lstrip("/"), Path(library).read_bytes(), mode=0o755)
        _add(layer, "etc/passwd", NOBODY.encode())
    return content.getvalue()


def _add(
    archive: tarfile.TarFile, name: str, data: bytes = b"", *, mode: int = 0o644, kind: bytes = b"", target: str = ""
) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.linkname = len(data), mode, target
    member.type = kind or tarfile.REGTYPE
    archive.addfile(member, io.BytesIO(data))


def _machine() -> str:
    return _said("uname", "-m").strip()


def _said(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
