"""NetworkPolicies as rules of nft for the pods of one node, as pure values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.api import Json

# By direction: where the rule's own pod is in a packet, where the other end is, and the field with the other ends.
DIRECTIONS = {"Ingress": ("daddr", "saddr", "from"), "Egress": ("saddr", "daddr", "to")}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All policies, pods and namespaces of the cluster."""

    policies: Sequence[Json]
    pods: Sequence[Json]
    namespaces: Sequence[Json]


def rules(world: World, node: str) -> str:
    """Return a script for nft. Denied packets are rejected, so that the sender notices at once.

    Packets of the node itself, such as the kubelet's probes, are not forwarded and so never denied.
    """
    chains, jumps = [], ["ct state established,related accept"]
    for pod in _with_addresses(world.pods):
        if pod["spec"]["nodeName"] == node:
            for direction, (own, _, _) in DIRECTIONS.items():
                policies = [policy for policy in world.policies if _selects(policy, pod, direction)]
                if policies:
                    address = pod["status"]["podIP"]
                    name = f"{direction}_{address.replace('.', '_')}"
                    allowed = [line for policy in policies for line in _allowed(world, policy, pod, direction)]
                    chains.append(f"  chain {name} {{ {'; '.join([*allowed, 'reject'])}; }}")
                    jumps.append(f"ip {own} {address} jump {name}")
    forward = f"  chain forward {{ type filter hook forward priority filter; {'; '.join(jumps)}; }}"
    return "\n".join(["table ip policies", "delete table ip policies", "table ip policies {", *chains, forward, "}"])


def _with_addresses(pods: Sequence[Json]) -> list[Json]:
    """Return the pods that have an address; a pod that has ended has given it back."""
    return [
        pod
        for pod in pods
        if pod["status"].get("podIP")
        and pod["status"].get("phase") in ("Pending", "Running")
        and not pod["spec"].get("hostNetwork")
    ]


def _selects(policy: Json, pod: Json, direction: str) -> bool:
    return (
        policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
        and direction in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"], _labels(pod))
    )


def _allowed(world: World, policy: Json, pod: Json, direction: str) -> Iterator[str]:
    _, other, field = DIRECTIONS[direction]
    for rule in policy["spec"].get(direction.lower()) or ():
        ends = [line for peer in rule[field] for line in _peer(world, policy, peer, other)] if rule.get(field) else [""]
        for end in ends:
            for port in _ports(rule, pod):
                yield f"{end} {port} return".strip()


def _peer(world: World, policy: Json, peer: Json, other: str) -> Iterator[str]:
    if block := peer.get("ipBlock"):
        yield " ".join(
            [f"ip {other} {block['cidr']}", *(f"ip {other} != {spared}" for spared in block.get("except") or ())]
        )
        return
    names = {policy["metadata"]["namespace"]}
    if "namespaceSelector" in peer:
        found = (space for space in world.namespaces if matches(peer["namespaceSelector"], _labels(space)))
        names = {space["metadata"]["name"] for space in found}
    addresses = [
        pod["status"]["podIP"]
        for pod in _with_addresses(world.pods)
        if pod["metadata"]["namespace"] in names and matches(peer.get("podSelector") or {}, _labels(pod))
    ]
    if addresses:
        yield f"ip {other} {{ {', '.join(sorted(addresses))} }}"


def _ports(rule: Json, pod: Json) -> Iterator[str]:
    if not rule.get("ports"):
        yield ""
    for port in rule.get("ports") or ():
        protocol = port.get("protocol", "TCP").lower()
        if "port" not in port:
            yield f"meta l4proto {protocol}"
        for number in _numbers(port, pod):
            yield f"{protocol} dport {number}"


def _numbers(port: Json, pod: Json) -> list[str]:
    """Return the numbers of a port; a name is that of a port of the pod itself."""
    if "port" not in port:
        return []
    if isinstance(port["port"], int):
        return [f"{port['port']}-{port['endPort']}" if "endPort" in port else f"{port['port']}"]
    declared = [each for container in pod["spec"]["containers"] for each in container.get("ports") or ()]
    return [str(each["containerPort"]) for each in declared if each.get("name") == port["port"]]


def matches(selector: Json, labels: Json) -> bool:
    """Return whether a label selector of Kubernetes selects these labels."""
    equal = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return equal and all(_meets(need, labels) for need in selector.get("matchExpressions") or ())


def _meets(need: Json, labels: Json) -> bool:
    value, operator = labels.get(need["key"]), need["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    return (value in need["values"]) == (operator == "In")


def _labels(thing: Json) -> Json:
    found: Json = thing["metadata"].get("labels") or {}
    return found
