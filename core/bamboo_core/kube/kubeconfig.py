"""Which API server to talk to, and as whom: from kubeconfig files as kubectl reads them, or from inside a pod.

Only reads; plugins are run by `credentials`. Whatever is wrong is a ConfigError that names the file.

By hand, because the official client (37.0.2) takes the current context of the last file where kubectl takes that of the
first, and leaves out `as`, by which a user has fewer rights (measured at b11a1fe3); it also lets private keys lie
in files until the process ends.
"""

import base64
import binascii
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
import yaml

from bamboo_core.job.api_object import without_nulls
from bamboo_core.kube.errors import ConfigError

T = TypeVar("T")
Entry = tuple[Path, dict[str, Any]]  # of a list in a file
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod that may ask the API server
EXTENSION = "client.authentication.k8s.io/exec"  # of a cluster, for plugins
EXEC_VERSION = "client.authentication.k8s.io/v1"


class ExecVariable(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class ExecPlugin(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A program that gives credentials, as EKS, GKE and AKS have it. command: "" if the file names none."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[ExecVariable, ...] = ()
    api_version: str = EXEC_VERSION
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False


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


# What is in a file


class KubeconfigPart(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A part of a kubeconfig. Its attributes are the fields; all may be absent, and what is not here is skipped."""


class Kubeconfig(KubeconfigPart, frozen=True):
    """A file. Of its entries only those that are chosen are looked at more closely."""

    current_context: str = ""
    contexts: tuple[dict[str, Any], ...] = ()
    clusters: tuple[dict[str, Any], ...] = ()
    users: tuple[dict[str, Any], ...] = ()


class Context(KubeconfigPart, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class Cluster(KubeconfigPart, frozen=True):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    extensions: tuple[dict[str, Any], ...] = ()


class AuthInfo(KubeconfigPart, frozen=True):
    token: str = ""
    token_file: str = msgspec.field(name="tokenFile", default="")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    as_user: str = msgspec.field(name="as", default="")
    as_uid: str = ""
    as_groups: tuple[str, ...] = ()
    as_user_extra: dict[str, tuple[str, ...]] = {}
    auth_provider: dict[str, Any] | None = None
    exec: ExecPlugin | None = None


# What is chosen from it


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


def choose(files: Sequence[tuple[Path, Kubeconfig]], context: str | None = None) -> Access:
    """The named context, else the current one, which is that of the first file that has one."""
    where = files[0][0]
    contexts = _by_name((file, found.contexts) for file, found in files)
    names = ", ".join(contexts) or "none: there are no contexts"
    current = context or next((found.current_context for _, found in files if found.current_context), None)
    if current is None:
        raise ConfigError(f"{where}: no current-context is set; expected --context, one of {names}")
    if current not in contexts:
        what = f"--context {context}" if context else f"{where}: current-context {current}"
        raise ConfigError(f"{what}: no such context; expected one of {names}")
    chosen, _ = _typed(contexts[current], "context", Context)
    clusters = _by_name((file, found.clusters) for file, found in files)
    users = _by_name((file, found.users) for file, found in files)
    if chosen.cluster not in clusters:
        raise ConfigError(f"{where}: context {current} names the cluster {chosen.cluster}, which is not there")
    if chosen.user and chosen.user not in users:
        raise ConfigError(f"{where}: context {current} names the user {chosen.user}, which is not there")
    cluster, cluster_file = _typed(clusters[chosen.cluster], "cluster", Cluster)
    user, user_file = _typed(users[chosen.user], "user", AuthInfo) if chosen.user else (AuthInfo(), where)
    return Access(
        context=current,
        server=_server(cluster, cluster_file),
        user=_user(user, user_file),
        namespace=chosen.namespace or "default",
        extension=next((one.get("extension") for one in cluster.extensions if one.get("name") == EXTENSION), None),
    )


def _by_name(files: Iterable[tuple[Path, Iterable[dict[str, Any]]]]) -> dict[str, Entry]:
    """The first file that has an entry of a name wins, as in kubectl."""
    found: dict[str, Entry] = {}
    for file, entries in files:
        for entry in entries:
            found.setdefault(str(entry.get("name")), (file, entry))
    return found


def _typed(entry: Entry, part: str, kind: type[T]) -> tuple[T, Path]:
    """What the entry has in that part, and its file."""
    file, found = entry
    return _converted(found.get(part, {}), kind, f"{file}: {part} {found.get('name')}"), file


def _converted(document: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        what = str(error)
        raise ConfigError(f"{where}: {what[:1].lower()}{what[1:]}") from None


def _read(file: Path) -> Kubeconfig:
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{file}: not valid YAML") from None
    return _converted(without_nulls({} if found is None else found), Kubeconfig, f"{file}: not a kubeconfig")


def _server(cluster: Cluster, file: Path) -> ClusterServer:
    url, proxy = cluster.server, cluster.proxy_url
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"{file}: server: expected a URL that begins with https://, got {url!r}")
    if proxy and not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"{file}: proxy-url: expected a URL that begins with http:// or https://, got {proxy!r}")
    authority = _pem("certificate-authority", cluster.certificate_authority_data, cluster.certificate_authority, file)
    return ClusterServer(
        url=url.rstrip("/"),
        authority=authority,
        insecure=cluster.insecure_skip_tls_verify,
        tls_name=cluster.tls_server_name or None,
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


def _user(user: AuthInfo, file: Path) -> User:
    if user.auth_provider is not None:
        name = user.auth_provider.get("name")
        raise ConfigError(
            f"{file}: auth-provider {name}: no longer supported; expected exec, as the cloud's own command"
            " writes it (gke-gcloud-auth-plugin, kubelogin, kubectl oidc-login)"
        )
    certificate = _pem("client-certificate", user.client_certificate_data, user.client_certificate, file)
    key = _pem("client-key", user.client_key_data, user.client_key, file)
    if (certificate is None) != (key is None):
        raise ConfigError(f"{file}: expected both client-certificate and client-key, or none")
    return User(
        token=user.token or None,
        token_file=_near(file, user.token_file) if user.token_file else None,
        certificate=certificate,
        key=key,
        name=user.username or None,
        password=user.password or None,
        plugin=_plugin(user.exec, file) if user.exec else None,
        acts_as=tuple(_acts_as(user)),
    )


def _acts_as(user: AuthInfo) -> Iterable[tuple[str, str]]:
    if user.as_user:
        yield "Impersonate-User", user.as_user
    if user.as_uid:
        yield "Impersonate-Uid", user.as_uid
    for group in user.as_groups:
        yield "Impersonate-Group", group
    for key, values in user.as_user_extra.items():
        for value in values:
            yield f"Impersonate-Extra-{key}", value


def _plugin(plugin: ExecPlugin, file: Path) -> ExecPlugin:
    """A command with a slash in it is relative to the file's folder; without one it is looked for on the PATH."""
    if not plugin.command:
        raise ConfigError(f"{file}: exec: expected an object with a command")
    if os.sep not in plugin.command:
        return plugin
    return msgspec.structs.replace(plugin, command=str(_near(file, plugin.command)))


def _pem(name: str, data: str, path: str, file: Path) -> str | None:
    """What is given in base64 or as a file; None if it is not given. Data win over a file, as in kubectl."""
    if data:
        try:
            return base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise ConfigError(f"{file}: {name}-data: expected base64") from None
    return _text(_near(file, path), file) if path else None


def _text(path: Path, source: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{source}: {path} cannot be read: {why}") from None


def _near(file: Path, path: str) -> Path:
    """Paths in a kubeconfig are relative to its folder."""
    return file.absolute().parent / Path(path).expanduser()
