r"""Patterns of texts in a manifest.

They match the same texts in Python and in an API server, which uses RE2. So they avoid classes such as \w and \s,
which differ between the two.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPattern:
    """A pattern of texts, their greatest length in characters (`most`), and a description for people."""

    description: str
    pattern: re.Pattern[str]
    most: int = 253

    def fits(self, text: str) -> bool:
        return len(text) <= self.most and self.pattern.fullmatch(text) is not None


def _form(description: str, pattern: str, most: int = 253) -> TextPattern:
    return TextPattern(description=description, pattern=re.compile(pattern), most=most)


def exactly(text: str) -> TextPattern:
    return _form(f'"{text}"', re.escape(text))


DNS_LABEL = _form(
    "a DNS-1123 label (lower-case letters, digits and '-', at most 63 characters)",
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    63,
)
DNS_NAME = _form("a DNS-1123 name (lower-case letters, digits, '-' and '.')", r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", 253)
METRIC = _form("the name of a metric", r"[A-Za-z_][A-Za-z0-9_]{0,63}", 64)
_NAME = "[A-Za-z_][A-Za-z0-9_]*"  # of something in Python
ENTRYPOINT = _form('"module:function"', rf"{_NAME}(\.{_NAME})*:{_NAME}")
_LABEL = r"[A-Za-z0-9]([-.A-Za-z0-9_]*[A-Za-z0-9])?"
LABEL_KEY = _form("a label key", rf"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?{_LABEL}")
RESOURCE = _form(
    "a resource name",
    rf"cpu|memory|ephemeral-storage|hugepages-[A-Za-z0-9]+|[a-z0-9]([-.a-z0-9]*[a-z0-9])?/{_LABEL}",
)
_PLACE, _PATH = r'[!"$-.0->A-~]+', r'(/[!"$->@-~]*)?'  # of printable characters: no / ? # @; no ? #
_URL = (
    rf"file://(localhost)?/+[!-.0-~][!-~]*|(s3a?|gs|gcs|az)://{_PLACE}{_PATH}"
    rf'|abfss?://([!"$-.0-9;->A-~]+@)?{_PLACE}{_PATH}|memory://({_PLACE})?{_PATH}'
)
STORAGE = _form(
    "the URL of a store without credentials and parameters, such as s3://bucket/folder, gs://bucket/folder, "
    "az://container/folder or file:///folder, or pvc://NAME, the name of a PersistentVolumeClaim",
    rf"({_URL}|pvc://{DNS_NAME.pattern.pattern})",
    2048,
)
WEIGHTS = _form(
    "a path without spaces and colons, or the URL of a store without credentials and parameters",
    rf"({_URL}|[!-,.-9;-~][!-9;-~]*)",
    2048,
)
TENSORS = _form('the name of a tensor, in which "*" stands for any characters', r"[!-,.-~][!-~]*")
IMAGE = _form("a container image", r"[^- \t\n\v\f\r][^ \t\n\v\f\r]*", 1024)
DECIMAL = _form('a decimal number in quotes such as "0.91"', r"[0-9]{1,9}(\.[0-9]{1,9})?", 19)
# As many decimals as the cost in the status, so that a restart of the operator does not change what was spent.
MONEY = _form('a decimal number in quotes with at most 4 decimals such as "99.95"', r"[0-9]{1,9}(\.[0-9]{1,4})?", 14)
_DAY = (
    r"20([0-9]{2}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|[0-9]{2}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|[0-9]{2}-02-(0[1-9]|1[0-9]|2[0-8])|([02468][048]|[13579][26])-02-29)"
)
DATE_TIME = _form(
    "a date and time of this century with its zone (RFC 3339) such as 2026-12-24T18:00:00Z",
    rf"{_DAY}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    32,
)
QUANTITY = _form("a Kubernetes quantity", r"[0-9]{1,18}(\.[0-9]{1,9})?([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?", 40)
