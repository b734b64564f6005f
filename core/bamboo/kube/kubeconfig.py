"""Which API server to talk to, and as whom: from kubeconfig files as kubectl reads them, or from inside a pod.

Only reads; plugins are run by `credentials`. Whatever is wrong is a ConfigError that names the file.

By hand, because the official client (37.0.2) takes the current context of the last file where kubectl takes that of the
first, and leaves out `as`, by which a user has fewer rights (bench/kubernetes_client.py); it also lets private keys lie
in files until the process ends.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from bamboo.kube.errors import ConfigError

Doc = Mapping[str, Any]
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod that may ask the API server
EXEC_VERSION = "client.authentication.k8s.io/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecPlugin:
    """A program that gives credentials, as EKS, GKE and AKS have it. pass_cluster: tell it about the cluster."""

    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    version: str = EXEC_VERSION
    install_hint: str = ""
    interactive: str = "IfAvailable"
    pass_cluster: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterServer:
    """authority: PEM of who signed its certificate; None: whom the system trusts. tls_name: its name in there."""

    url: str
    authority: str | None = None
    insecure: bool = False
    tls_name: str | None = None
    proxy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Any of these; a plugin only if there is no other. token_file is read anew each time: it is rotated."""

    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)
    name: str | None = None
    password: str | None = field(default=None, repr=False)
    plugin: ExecPlugin | None = None
    acts_as: tuple[tuple[str, str], ...] = ()  # headers with which the user acts as somebody else


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """namespace: the one that commands are about if none is named. extensions: for plugins that want the cluster."""

    context: str
    server: ClusterServer
    user: User
    namespace: str = "default"
    extension: Any = None


def load(path: str | None = None, context: str | None = None, environment: Mapping[str, str] = os.environ) -> Access:
    """path, then KUBECONFIG, then ~/.kube/config, then the pod's own ServiceAccount, as kubectl does it."""
    files = [Path(path)] if path else _files(environment)
    found = [file for file in files if file.is_file()]
    if path and not found:
        raise ConfigError(f"--kubeconfig {path}: no such file")
    if found:
        return choose([(file, _read(file)) for file in found], context)
    if context:
        raise ConfigError(f"--context {context}: there is no kubeconfig ({' or '.join(map(str, files))})")
    inside = in_cluster(environment)
    if inside is None:
        raise ConfigError(f"no cluster: there is no kubeconfig ({' or '.join(map(str, files))}); set KUBECONFIG")
    return inside


def _files(environment: Mapping[str, str]) -> list[Path]:
    listed = [Path(p) for p in environment.get("KUBECONFIG", "").split(os.pathsep) if p]
    return listed or [Path(environment.get("HOME") or "~").expanduser() / ".kube" / "config"]


def in_cluster(environment: Mapping[str, str], account: Path = ACCOUNT) -> Access | None:
    """The ServiceAccount of the pod that this process runs in; None outside of pods."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (account / "token").is_file():
        return None
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    named = account / "namespace"
    return Access(
        context="in-cluster",
        server=ClusterServer(url=url, authority=_text(account / "ca.crt", account)),
        user=User(token_file=account / "token"),
        namespace=_text(named, account).strip() if named.is_file() else "default",
    )


def choose(files: Sequence[tuple[Path, Doc]], context: str | None = None) -> Access:
    """The named context, else the current one. The first file that has an entry of a name wins, as in kubectl."""
    where = files[0][0]
    current = context or next((str(doc["current-context"]) for _, doc in files if doc.get("current-context")), None)
    if current is None:
        raise ConfigError(f"{where}: no current-context is set; expected --context, one of {_names(files, 'contexts')}")
    entry = _entry(files, "contexts", current)
    if entry is None:
        what = f"--context {context}" if context else f"{where}: current-context {current}"
        raise ConfigError(f"{what}: no such context; expected one of {_names(files, 'contexts')}")
    chosen = _part(entry[1], "context", entry[0])
    cluster, cluster_file = _referred(files, "clusters", chosen.get("cluster"), current, "cluster")
    user, user_file = _referred(files, "users", chosen["user"], current, "user") if chosen.get("user") else ({}, where)
    return Access(
        context=current,
        server=_server(cluster, cluster_file),
        user=_user(user, user_file),
        namespace=str(chosen.get("namespace") or "default"),
        extension=_extension(cluster),
    )


def _read(file: Path) -> Doc:
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{file}: not valid YAML") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a kubeconfig, which is an object")
    return found


def _entry(files: Sequence[tuple[Path, Doc]], kind: str, name: str) -> tuple[Path, Doc] | None:
    for file, doc in files:
        for entry in _entries(file, doc, kind):
            if entry.get("name") == name:
                return file, entry
    return None


def _entries(file: Path, doc: Doc, kind: str) -> list[Doc]:
    found = doc.get(kind) or []
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ConfigError(f"{file}: {kind}: expected a list of objects")
    return found


def _names(files: Sequence[tuple[Path, Doc]], kind: str) -> str:
    names = [str(entry.get("name")) for file, doc in files for entry in _entries(file, doc, kind)]
    return ", ".join(dict.fromkeys(names)) or "none: there are no contexts"


def _part(entry: Doc, name: str, file: Path) -> Doc:
    found = entry.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: {name} {entry.get('name')}: expected an object")
    return found


def _referred(files: Sequence[tuple[Path, Doc]], kind: str, name: Any, context: str, part: str) -> tuple[Doc, Path]:
    entry = _entry(files, kind, str(name))
    if entry is None:
        raise ConfigError(f"{files[0][0]}: context {context} names the {part} {name}, which is not there")
    return _part(entry[1], part, entry[0]), entry[0]


def _server(cluster: Doc, file: Path) -> ClusterServer:
    url = str(cluster.get("server") or "")
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"{file}: server: expected a URL that begins with https://, got {url!r}")
    proxy = str(cluster.get("proxy-url") or "")
    if proxy and not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"{file}: proxy-url: expected a URL that begins with http:// or https://, got {proxy!r}")
    return ClusterServer(
        url=url.rstrip("/"),
        authority=_data(cluster, "certificate-authority", file),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        tls_name=cluster.get("tls-server-name") or None,
        proxy=proxy or environment_proxy(url),
    )


def environment_proxy(url: str) -> str | None:
    """What HTTPS_PROXY, HTTP_PROXY and NO_PROXY say about that server; never a proxy for this machine itself."""
    parts, proxies = urlsplit(url), getproxies()
    host, found = parts.hostname or "", proxies.get(parts.scheme, "")
    if host == "localhost" or host.startswith("127.") or host == "::1" or proxy_bypass(host):
        return None
    if not found or _within(host, proxies.get("no", "")):
        return None
    scheme, separator, _ = found.partition("://")
    if not separator:
        return f"http://{found}"  # as kubectl takes it
    if scheme.lower() not in ("http", "https"):  # the rest may have a password in it
        name = f"{parts.scheme.upper()}_PROXY"
        raise ConfigError(f"{name}: expected a URL that begins with http:// or https://, got one with {scheme}://")
    return found


def _within(host: str, exceptions: str) -> bool:
    """Whether the host is an address in one of the networks that NO_PROXY names (10.0.0.0/8), as kubectl has it."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    for entry in exceptions.split(","):
        try:
            if address in ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue  # a name, which is proxy_bypass's
    return False


def _user(user: Doc, file: Path) -> User:
    if provider := user.get("auth-provider"):
        name = provider.get("name") if isinstance(provider, dict) else provider
        raise ConfigError(
            f"{file}: auth-provider {name}: no longer supported; expected exec, as the cloud's own command"
            " writes it (gke-gcloud-auth-plugin, kubelogin, kubectl oidc-login)"
        )
    certificate, key = _data(user, "client-certificate", file), _data(user, "client-key", file)
    if (certificate is None) != (key is None):
        raise ConfigError(f"{file}: expected both client-certificate and client-key, or none")
    given = User(
        token=user.get("token") or None,
        token_file=_near(file, user["tokenFile"]) if user.get("tokenFile") else None,
        certificate=certificate,
        key=key,
        name=user.get("username") or None,
        password=user.get("password") or None,
        acts_as=tuple(_acts_as(user)),
    )
    return replace(given, plugin=_plugin(user["exec"], file)) if user.get("exec") else given


def _acts_as(user: Doc) -> list[tuple[str, str]]:
    headers = [("Impersonate-User", str(user["as"]))] if user.get("as") else []
    headers += [("Impersonate-Uid", str(user["as-uid"]))] if user.get("as-uid") else []
    headers += [("Impersonate-Group", str(group)) for group in user.get("as-groups") or ()]
    extra = user.get("as-user-extra") or {}
    return headers + [(f"Impersonate-Extra-{key}", str(value)) for key in extra for value in extra[key]]


def _plugin(section: Any, file: Path) -> ExecPlugin:
    if not isinstance(section, dict) or not section.get("command"):
        raise ConfigError(f"{file}: exec: expected an object with a command")
    command = str(section["command"])
    if os.sep in command:
        command = str(_near(file, command))
    return ExecPlugin(
        command=command,
        args=tuple(map(str, section.get("args") or ())),
        env=tuple((str(e["name"]), str(e["value"])) for e in section.get("env") or ()),
        version=str(section.get("apiVersion") or EXEC_VERSION),
        install_hint=" ".join(str(section.get("installHint") or "").split()),
        interactive=str(section.get("interactiveMode") or "IfAvailable"),
        pass_cluster=bool(section.get("provideClusterInfo")),
    )


def _extension(cluster: Doc) -> Any:
    for entry in cluster.get("extensions") or ():
        if entry.get("name") == "client.authentication.k8s.io/exec":
            return entry.get("extension")
    return None


def _data(section: Doc, name: str, file: Path) -> str | None:
    """PEM, given in base64 or as a file. Data win over a file, as in kubectl."""
    if encoded := section.get(f"{name}-data"):
        try:
            return base64.b64decode(str(encoded), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise ConfigError(f"{file}: {name}-data: expected base64") from None
    return _text(_near(file, section[name]), file) if section.get(name) else None


def _text(path: Path, source: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{source}: {path} cannot be read: {why}") from None


def _near(file: Path, path: Any) -> Path:
    """Paths in a kubeconfig are relative to its folder."""
    return file.absolute().parent / Path(str(path)).expanduser()
