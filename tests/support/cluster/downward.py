"""What a pod may learn about itself: fieldRef and resourceFieldRef, in environment and volumes."""

import json
import math
import re
from decimal import Decimal
from typing import Any

Json = dict[str, Any]
SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}
ENTRY = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class Unknown(Exception):
    """A field or an object that a container needs is not there. The container waits for it."""


def field(pod: Json, path: str) -> str:
    """pod: its status must hold the addresses already."""
    if entry := ENTRY.fullmatch(path):
        return str(pod["metadata"].get(entry[1], {}).get(entry[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = pod["metadata"].get(path.partition(".")[2], {})
        return "".join(f"{key}={json.dumps(value)}\n" for key, value in sorted(entries.items()))
    section, _, name = path.partition(".")
    if name == "podIPs":
        return ",".join(ip["ip"] for ip in pod["status"]["podIPs"])
    found = pod.get(section, {}).get(name)
    if not isinstance(found, str):
        raise Unknown(f"the pod has no field {path}")
    return found


def resource(container: Json, reference: Json, allocatable: Json) -> str:
    """A limit that is not set is what the node has; a request that is not set is the limit, else 0."""
    kind, _, name = reference["resource"].partition(".")
    resources = container.get("resources", {})
    limit = resources.get("limits", {}).get(name)
    if kind == "limits":
        value = limit or allocatable.get(name, "0")
    else:
        value = resources.get("requests", {}).get(name) or limit or "0"
    divisor = quantity(reference.get("divisor") or "1") or Decimal(1)
    return str(math.ceil(quantity(value) / divisor))


def quantity(text: str) -> Decimal:
    number, suffix = re.fullmatch(r"([\d.]+)(\D*)", text, re.ASCII).groups()  # type: ignore[union-attr]
    return Decimal(number) * SUFFIXES[suffix]
