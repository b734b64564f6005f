"""URLs of stores: a parser, and a form for display without credentials."""

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from bamboo_core.text import one_line

# URL protocol: fsspec's protocol, and the extra that installs its package.
PROTOCOLS: Final = {
    "s3": ("s3", "s3"),
    "s3a": ("s3", "s3"),
    "gs": ("gs", "gs"),
    "gcs": ("gs", "gs"),
    "az": ("az", "az"),
    "abfs": ("abfs", "az"),
    "abfss": ("abfs", "az"),
    "memory": ("memory", ""),
}
EXPECTED: Final = (
    "a path or a URL such as file:///folder, s3://bucket/folder, gs://bucket/folder, az://container/folder"
)
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SECRETS: Final = (
    (re.compile(r"(://)[^/\s@\"']*@"), r"\1"),  # a user and a password
    (
        re.compile(
            r"(?i)\b((?:sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|accountkey|sharedaccesssignature|credential|"
            r"authorization|access_token|token|password|secret)\b[\"']?\s*[=:]\s*[\"']?)(?:(?:bearer|basic)\s+)?[^\s&,;\"']+"
        ),
        r"\1...",
    ),
    (re.compile(r"(://[^\s?#]*)[?#]\S+"), r"\1"),
)
_SECRET_NAMES: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING|SIGNATURE", re.IGNORECASE)
_SHORTEST_SECRET: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """The parsed URL of a store."""

    protocol: str  # "file" or one of fsspec's
    path: str  # an absolute local path, or the whole URL for fsspec
    shown: str
    extra: str = ""


def parse_url(url: str, what: str = "checkpoint URL") -> StoreUrl:
    """Parse a store's URL or local path. what: its purpose, for messages. Raises ValueError with a sentence that has no
    credentials.
    """
    with contextlib.suppress(UnicodeError):
        url = os.fsencode(url).decode()  # an argument with characters that the locale lacks
    if not url or not url.isprintable():
        raise ValueError(f"{what} {one_line(shown_url(url), 100)!r}: expected {EXPECTED}")
    match = _SCHEME.fullmatch(url)
    if not match:
        return _file(os.fsdecode(url.encode()))
    protocol, rest = match[1].lower(), match[2]
    shown = shown_url(url)
    if protocol == "file":
        place, _, path = rest.partition("/")
        if place not in ("", "localhost") or not path.strip("/"):
            raise ValueError(f"{what} {shown}: expected file:/// and an absolute path")
        return _file(file_path(url))
    if protocol not in PROTOCOLS:
        raise ValueError(f"{what} {shown}: nothing is known of {protocol}://; expected {EXPECTED}")
    place = rest.partition("/")[0]
    user, at, _ = place.rpartition("@")
    if "?" in rest or "#" in rest or (at and (protocol not in ("abfs", "abfss") or ":" in user)):
        raise ValueError(
            f"{what} {shown}: expected one without credentials and parameters; credentials come from the "
            "environment (docs/checkpoints.md)"
        )
    if not place and protocol != "memory":
        raise ValueError(f"{what} {shown}: expected {EXPECTED}")
    name, extra = PROTOCOLS[protocol]
    return StoreUrl(protocol=name, path=f"{name}://{rest.rstrip('/')}", shown=shown, extra=extra)


def file_path(url: str) -> str:
    """Return the local path of a URL file:///..., with the same bytes in every locale."""
    return os.fsdecode(unquote_to_bytes("/" + url.partition("://")[2].partition("/")[2]))


def _file(path: str) -> StoreUrl:
    path = os.path.abspath(path)
    return StoreUrl(protocol="file", path=path, shown=os.fsencode(path).decode("utf-8", "backslashreplace"))


def shown_url(url: str) -> str:
    """Return the URL for messages and logs, with "..." for user (except abfs's container), password and parameters."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return one_line(url)
    place, slash, path = re.split(r"(?<=[?#])", rest, maxsplit=1)[0].partition("/")
    user, at, host = place.rpartition("@")
    shown = user if scheme.lower() in ("abfs", "abfss") and ":" not in user else "..."
    hidden = "..." if (path or host).endswith(("?", "#")) else ""
    return one_line(f"{scheme}://{shown if at else ''}{at}{host}{slash}{path.rstrip('/')}{hidden}")


def without_secrets(text: str) -> str:
    """Return the text in one line, without apparent credentials, parameters of URLs, and values of environment
    variables with secret-like names; values with fewer than _SHORTEST_SECRET characters stay.
    """
    values = {
        value for name, value in os.environ.items() if _SECRET_NAMES.search(name) and len(value) >= _SHORTEST_SECRET
    }
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "...")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return one_line(text)
