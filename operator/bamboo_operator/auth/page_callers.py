"""Who asks for a page, by the headers of the request: who holds a token, or whom a trusted proxy has signed in.

A proxy's headers count only in a request that shows the secret which the operator and the proxy share. Anybody else's
are ignored, as if they were not there.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from multidict import CIMultiDict, CIMultiDictProxy

from bamboo_core.names import PAGE_AUDIENCE
from bamboo_core.page.server import bearer

Headers = CIMultiDict[str] | CIMultiDictProxy[str]
SECRET_HEADER = "X-Bamboo-Proxy-Secret"  # noqa: S105 - the header's name, not a secret
USER_HEADER, GROUPS_HEADER = "X-Forwarded-User", "X-Forwarded-Groups"
LEAST_SECRET = 16  # bytes
CLUSTERS_OWN = "system:"  # names that begin so are the cluster's: no proxy can sign them in
AUTHENTICATED = "system:authenticated"  # the group that the API server puts everybody into whom it knows


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyHeaders:
    """How a trusted proxy says who looks. prefixes: put before the names that it gives, as the API server's own OIDC
    settings have it, so that the same RoleBindings hold.
    """

    secret: Path  # the file with the secret that it shows
    user: str = USER_HEADER
    groups: str = GROUPS_HEADER  # separated by commas
    user_prefix: str = ""
    group_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerRules:
    """Whom the operator's web port believes. audiences: of tokens; proxy: None if no proxy is trusted."""

    audiences: tuple[str, ...] = (PAGE_AUDIENCE,)
    proxy: ProxyHeaders | None = None


@dataclass(frozen=True, slots=True)
class PageRefusal:
    """Why somebody may not see a page."""

    status: int  # of the answer
    sentence: str
    retry: int | None = None  # seconds after which it makes sense to ask again


@dataclass(frozen=True, slots=True)
class TokenCaller:
    """Somebody with a token; whose it is, a TokenReview has to say."""

    token: str

    @property
    def key(self) -> bytes:
        """A digest that no other caller has."""
        return sha256(b"token\0" + self.token.encode()).digest()


@dataclass(frozen=True, slots=True)
class ProxyCaller:
    """Somebody whom the proxy has signed in."""

    user: str
    groups: tuple[str, ...]

    @property
    def key(self) -> bytes:
        """A digest that no other caller has; no header can have a line's end in it."""
        return sha256(b"proxy\0" + "\n".join((self.user, *self.groups)).encode(errors="surrogateescape")).digest()


PageCaller = TokenCaller | ProxyCaller


def read_secret(path: Path) -> bytes:
    """The secret in that file, without what is blank around it. Raises OSError, and ValueError if it is too short."""
    secret = path.read_bytes().strip()
    if len(secret) < LEAST_SECRET:
        raise ValueError(f"expected at least {LEAST_SECRET} bytes in {path}, got {len(secret)}")
    return secret


def caller_of(headers: Headers, proxy: ProxyHeaders | None, secret: bytes | None) -> PageCaller | PageRefusal | None:
    """Who asks; None if the request does not say. secret: the one that the proxy shows; None if there is none."""
    if proxy is not None and secret is not None and _shows(headers, secret):
        return _signed_in(headers, proxy)
    token = bearer(headers)
    return TokenCaller(token) if token else None


def _shows(headers: Headers, secret: bytes) -> bool:
    shown = headers.getall(SECRET_HEADER, [])
    return len(shown) == 1 and hmac.compare_digest(shown[0].encode(errors="surrogateescape"), secret)


def _signed_in(headers: Headers, proxy: ProxyHeaders) -> PageCaller | PageRefusal:
    """A header that is there twice may be the caller's own beside the proxy's, so that neither is believed."""
    users, groups = headers.getall(proxy.user, []), headers.getall(proxy.groups, [])
    name = users[0].strip() if len(users) == 1 else ""
    if not name:
        return PageRefusal(401, f"The proxy does not say who looks: expected one header {proxy.user}.")
    if len(groups) > 1:
        return PageRefusal(401, f"Expected one header {proxy.groups} at most, got {len(groups)}.")
    user = proxy.user_prefix + name
    if user.startswith(CLUSTERS_OWN):
        return PageRefusal(403, f'The proxy cannot sign in "{user}": that name is the cluster\'s own.')
    given = [one.strip() for one in groups[0].split(",")] if groups else []
    named = [proxy.group_prefix + one for one in given if one]
    return ProxyCaller(user, (*(one for one in named if not one.startswith(CLUSTERS_OWN)), AUTHENTICATED))
