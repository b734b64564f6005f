"""Who the user is, as the API server wants to see it: headers and a TLS context; plugins are run, and run again.

By hand, because the official client (37.0.2) goes on as nobody after a plugin has failed, hides what a plugin asks the
user, prefers it to a token, and sends a token file's line end, read once for all (measured at b11a1fe3).
"""

import asyncio
import base64
import json
import os
import ssl
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bamboo_core.complaints import system_reason
from bamboo_core.kube.errors import ClusterUnreachable, ConfigError
from bamboo_core.kube.kubeconfig import Access, ClusterServer, ExecPlugin, User

PLUGIN_SECONDS = 60.0  # it may ask a cloud
INTERACTIVE_SECONDS = 600.0  # or a person, in a browser
EARLY_SECONDS = 60.0  # a credential is renewed that long before it expires


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """What a plugin gave. expires: None if it said nothing of that."""

    token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)
    expires: datetime | None = None

    def fresh(self, now: datetime) -> bool:
        return self.expires is None or (self.expires - now).total_seconds() > EARLY_SECONDS


class Credentials:
    """The credentials with which one command speaks to the API server, as long as it lives."""

    def __init__(self, access: Access) -> None:
        self._access, self._given = access, Credential()
        self._has, self._lock = False, asyncio.Lock()

    @property
    def certificate(self) -> str | None:
        """The client's, if a plugin gave one."""
        return self._given.certificate

    async def renew(self, *, refused: bool = False) -> bool:
        """Runs the plugin if there is one and it is time to, or what it gave was refused. True: it was run."""
        plugin, user = self._access.user.plugin, self._access.user
        if plugin is None or user.token or user.token_file or user.certificate:
            return False
        async with self._lock:
            if self._has and self._given.fresh(datetime.now(UTC)) and not refused:
                return False
            self._given = await run_plugin(plugin, self._access)
            self._has = True
            return True

    def headers(self) -> list[tuple[str, str]]:
        user, token = self._access.user, self._token()
        headers = list(user.acts_as)
        if token:
            headers.append(("Authorization", f"Bearer {token}"))
        elif user.name:
            pair = base64.b64encode(f"{user.name}:{user.password or ''}".encode()).decode()
            headers.append(("Authorization", f"Basic {pair}"))
        return headers

    def _token(self) -> str | None:
        user = self._access.user
        if user.token_file:
            try:
                return user.token_file.read_text().strip()
            except OSError as error:
                if not user.token:
                    raise ConfigError(f"tokenFile {user.token_file}: cannot be read: {system_reason(error)}") from None
        return user.token or self._given.token

    def tls(self) -> ssl.SSLContext | bool:
        """With the certificates as they are now; False for plain HTTP."""
        if not self._access.server.url.startswith("https:"):
            return False
        return tls_context(self._access.server, self._access.user, self._given)


def tls_context(server: ClusterServer, user: User, given: Credential) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=server.authority)
    except ssl.SSLError:
        raise ConfigError("certificate-authority: expected a certificate in PEM") from None
    if server.authority:
        # Python 3.13 asks more of certificates than kubectl does, and refuses those of older EKS clusters, which lack
        # the authority's key identifier. Who signed them is checked all the same.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if server.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = user.certificate or given.certificate, user.key or given.key
    if certificate and key:
        _load_pair(context, certificate, key)
    return context


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """The ssl module takes certificates from files only; this one is nobody else's, and short-lived."""
    with tempfile.NamedTemporaryFile("w", prefix="bamboo-") as file:
        file.write(f"{certificate}\n{key}")
        file.flush()
        try:
            context.load_cert_chain(file.name, password=lambda: "")
        except ssl.SSLError:
            message = "client-certificate and client-key: expected a certificate and its key in PEM, without a password"
            raise ConfigError(message) from None


# Plugins: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins


async def run_plugin(plugin: ExecPlugin, access: Access) -> Credential:
    """What the program gives. Its errors go to the user's terminal, where it may also ask."""
    terminal = sys.stdin.isatty() and plugin.interactive_mode != "Never"
    if plugin.interactive_mode == "Always" and not terminal:
        raise ConfigError(f"exec: {plugin.command} needs to prompt, and there is no terminal")
    environment = {
        **os.environ,
        **{one.name: one.value for one in plugin.env},
        "KUBERNETES_EXEC_INFO": json.dumps(request(plugin, access, terminal)),
    }
    limit = INTERACTIVE_SECONDS if terminal else PLUGIN_SECONDS
    try:
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *plugin.args,
            env=environment,
            stdin=None if terminal else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        hint = f"; {' '.join(plugin.install_hint.split())}" if plugin.install_hint else ""
        raise ConfigError(f"exec: {plugin.command} cannot be run: {system_reason(error)}{hint}") from None
    try:
        async with asyncio.timeout(limit):
            output, _ = await process.communicate()
    except TimeoutError:
        raise ClusterUnreachable(f"exec: {plugin.command} gave no credentials within {limit:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ClusterUnreachable(
            f"exec: {plugin.command} gave no credentials: it ended with exit code {process.returncode}"
        )
    return answer(output, plugin)


def request(plugin: ExecPlugin, access: Access, interactive: bool) -> dict[str, Any]:
    """What the program is told."""
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.provide_cluster_info:
        spec["cluster"] = _cluster(access)
    return {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}


def _cluster(access: Access) -> dict[str, Any]:
    server = access.server
    authority = base64.b64encode(server.authority.encode()).decode() if server.authority else None
    told = {
        "server": server.url,
        "certificate-authority-data": authority,
        "tls-server-name": server.tls_name,
        "insecure-skip-tls-verify": server.insecure or None,
        "proxy-url": server.proxy,
        "config": access.extension,
    }
    return {key: value for key, value in told.items() if value is not None}


def answer(output: bytes, plugin: ExecPlugin) -> Credential:
    """What the program printed, an ExecCredential. It is secret, and so never part of a message."""
    try:
        found = json.loads(output)
    except ValueError:
        raise ConfigError(f"exec: {plugin.command} printed no ExecCredential in JSON") from None
    status = found.get("status") if isinstance(found, dict) else None
    if not isinstance(status, Mapping):
        raise ConfigError(f"exec: {plugin.command} printed no ExecCredential with a status")
    if found.get("apiVersion") != plugin.api_version:
        given = str(found.get("apiVersion"))[:80]
        raise ConfigError(f"exec: {plugin.command} speaks {given}; expected {plugin.api_version}")
    token, certificate, key = (status.get(n) or None for n in ("token", "clientCertificateData", "clientKeyData"))
    if not token and not (certificate and key):
        raise ConfigError(f"exec: {plugin.command} gave neither a token nor a certificate with its key")
    return Credential(
        token=token, certificate=certificate, key=key, expires=_time(status.get("expirationTimestamp"), plugin)
    )


def _time(text: Any, plugin: ExecPlugin) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        raise ConfigError(f"exec: {plugin.command} gave no valid expirationTimestamp") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
