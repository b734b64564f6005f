"""Pure functions that compute nftables rules and DNS names for Services from API objects.

Not supported: node ports, session affinity, SRV records, and a pod's connection to itself through its own Service.
"""

from collections.abc import Iterator, Mapping, Sequence

from cluster.addresses import SERVICES
from cluster.api import Json

DOMAIN = "svc.cluster.local"


def rules(services: Sequence[Json], endpoints: Sequence[Json]) -> str:
    """Return the nodes' nft script: it spreads connections over a Service's endpoints; without any, they fail."""
    by_name = _by_name(endpoints)
    lines = [line for service in services for line in _service(service, by_name.get(_name(service), []))]
    body = "; ".join([*lines, ""])
    return "\n".join(
        [
            "table ip services",
            "delete table ip services",
            "table ip services {",
            f"  chain services {{ {body}}}",
            "  chain arriving { type nat hook prerouting priority dstnat; jump services; }",
            "  chain starting { type nat hook output priority -100; jump services; }",
            f"  chain nothing {{ type filter hook forward priority filter; ip daddr {SERVICES} reject; }}",
            "}",
        ]
    )


def names(services: Sequence[Json], endpoints: Sequence[Json]) -> dict[str, list[str]]:
    """Return IPv4 addresses by DNS name: of Services, and of their endpoints that have a hostname."""
    by_name = _by_name(endpoints)
    found: dict[str, list[str]] = {}
    for service in services:
        namespace, name = _name(service)
        domain = f"{name}.{namespace}.{DOMAIN}"
        ready = [each for subset in by_name.get((namespace, name), []) for each in subset.get("addresses") or ()]
        address = service["spec"].get("clusterIP", "None")
        found[domain] = [each["ip"] for each in ready] if address == "None" else [address]
        for each in ready:
            if "hostname" in each:
                found.setdefault(f"{each['hostname']}.{domain}", []).append(each["ip"])
    return {name: addresses for name, addresses in found.items() if addresses}


def _service(service: Json, subsets: Sequence[Json]) -> Iterator[str]:
    address = service["spec"].get("clusterIP", "None")
    if address in ("None", ""):
        return
    for port in service["spec"].get("ports") or ():
        ends = [*_ends(subsets, port.get("name"))]
        if ends:
            choices = ", ".join(f"{index} : {end}" for index, end in enumerate(ends))
            chosen = f"dnat ip to numgen inc mod {len(ends)} map {{ {choices} }}"
            yield f"ip daddr {address} {port.get('protocol', 'TCP').lower()} dport {port['port']} {chosen}"


def _ends(subsets: Sequence[Json], port_name: str | None) -> Iterator[str]:
    for subset in subsets:
        for port in subset.get("ports") or ():
            if port.get("name") == port_name:
                yield from (f"{each['ip']} . {port['port']}" for each in subset.get("addresses") or ())


def _by_name(endpoints: Sequence[Json]) -> Mapping[tuple[str, str], list[Json]]:
    return {_name(each): each.get("subsets") or [] for each in endpoints}


def _name(thing: Json) -> tuple[str, str]:
    return thing["metadata"]["namespace"], thing["metadata"]["name"]
