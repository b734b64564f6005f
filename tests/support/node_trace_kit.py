"""Recordings of nodes as JSON lines."""

import json

OWN = """\
{"format":"bamboo-trace","version":1,"duration":7200.0,"source":"made for a test"}
{"at":0.0,"price":1.0,"zone":"east","onDemand":3.0}
{"at":0.0,"add":"n1","zone":"east-a"}
{"at":0.0,"add":"n2","zone":"east-b"}
{"at":1800.0,"price":2.0,"zone":"east-b"}
{"at":3600.0,"remove":"n2","zone":"east-b","notice":120.0}
"""


def recording(duration: float, zones: dict[str, int], *entries: dict[str, object]) -> str:
    """Return a recording: nodes ZONE-1, ZONE-2 and so on, then these entries. zones: number of nodes by zone."""
    nodes = [
        {"at": 0, "add": f"{zone}-{n}", "zone": zone} for zone, number in zones.items() for n in range(1, number + 1)
    ]
    lines = [{"format": "bamboo-trace", "version": 1, "duration": duration}, *nodes, *entries]
    return "".join(f"{json.dumps(line)}\n" for line in lines)
