"""The addresses of a cluster's real nodes and their pods, all in the cluster's own network 10.SUBNET.0.0/16."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

NODES = range(1, 31)  # the numbers that nodes can have
SERVICES = "10.96.0.0/16"


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses and names of a cluster. subnet: 1 to 249, different for each cluster on this machine."""

    subnet: int

    @property
    def machine(self) -> str:
        """The address of this machine, at which the API server and the DNS server listen."""
        return f"10.{self.subnet}.0.1"

    @property
    def link(self) -> str:
        """The name of the network interface that connects this machine with the cluster."""
        return f"bamboo{self.subnet}"

    def node(self, number: int) -> str:
        return f"10.{self.subnet}.0.{10 + number}"

    def pods(self, number: int) -> str:
        return f"10.{self.subnet}.{number}.0/24"

    @property
    def groups(self) -> str:
        """The prefix of the nodes' cgroup names."""
        return f"bamboo-{self.subnet}-"

    def group(self, number: int) -> str:
        """Return the name of a node's cgroup, the same in every hierarchy."""
        return f"{self.groups}{number}"


def is_free(subnet: int, routes: Iterable[str]) -> bool:
    """Return whether 10.SUBNET.0.0/16 overlaps neither SERVICES nor a destination in `routes`; "default" is ignored."""
    wanted = ipaddress.ip_network(f"10.{subnet}.0.0/16")
    known = (ipaddress.ip_network(route) for route in routes if route != "default")
    return not any(wanted.overlaps(network) for network in (*known, ipaddress.ip_network(SERVICES)))
