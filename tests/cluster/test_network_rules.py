"""What Services and NetworkPolicies become on a real node: rules of nft and names, as pure values."""

import struct

from cluster import name_server, policies, services
from cluster.client import Json


def pod(name: str, address: str, *, node: str = "here", namespace: str = "ours") -> Json:
    ports = [{"name": "web", "containerPort": 8000}]
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"nodeName": node, "containers": [{"ports": ports}]},
        "status": {"phase": "Running", "podIP": address},
    }


def rules(*specs: Json) -> str:
    world = policies.World(
        policies=[{"metadata": {"name": "p", "namespace": "ours"}, "spec": spec} for spec in specs],
        pods=[pod("web", "10.1.1.2"), pod("friend", "10.1.2.2", node="there"), pod("far", "10.1.2.3", namespace="its")],
        namespaces=[{"metadata": {"name": name, "labels": {"name": name}}} for name in ("ours", "its")],
    )
    return policies.rules(world, "here")


def ingress(*rules: Json) -> Json:
    selector = {"matchLabels": {"app": "web"}}
    return {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(rules)}


def test_a_pod_without_policies_has_no_rules() -> None:
    assert "chain Ingress" not in rules()
    assert "chain Ingress" not in rules({"podSelector": {"matchLabels": {"app": "friend"}}, "policyTypes": ["Ingress"]})


def test_a_policy_without_rules_denies_everything() -> None:
    text = rules(ingress())
    assert "chain Ingress_10_1_1_2 { reject; }" in text
    assert "ip daddr 10.1.1.2 jump Ingress_10_1_1_2" in text
    assert "Egress" not in text


def test_peers_are_pods_of_the_own_namespace_unless_another_one_is_named() -> None:
    friend: Json = {
        "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["friend", "far"]}]}
    }
    web = {"port": "web"}
    text = rules(ingress({"from": [friend], "ports": [web]}))
    assert "{ ip saddr { 10.1.2.2 } tcp dport 8000 return; reject; }" in text
    other = {**friend, "namespaceSelector": {"matchLabels": {"name": "its"}}}
    assert "{ ip saddr { 10.1.2.3 } tcp dport 8000 return; reject; }" in rules(
        ingress({"from": [other], "ports": [web]})
    )
    nobody = {"podSelector": {"matchLabels": {"app": "nobody"}}}
    assert "{ reject; }" in rules(ingress({"from": [nobody]}))


def test_blocks_spare_addresses_and_ports_have_ranges() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    text = rules(ingress({"from": [block], "ports": [{"port": 80, "endPort": 90, "protocol": "UDP"}]}))
    assert "{ ip saddr 10.0.0.0/8 ip saddr != 10.1.0.0/16 udp dport 80-90 return; reject; }" in text


def endpoints(*addresses: Json) -> Json:
    subset = {"addresses": list(addresses), "ports": [{"name": "web", "port": 8000}]}
    return {"metadata": {"name": "web", "namespace": "ours"}, "subsets": [subset]}


def service(address: str) -> Json:
    ports = [{"name": "web", "port": 80, "targetPort": 8000}]
    return {"metadata": {"name": "web", "namespace": "ours"}, "spec": {"clusterIP": address, "ports": ports}}


def test_a_service_leads_to_its_pods_in_turn() -> None:
    ends = [endpoints({"ip": "10.1.1.2"}, {"ip": "10.1.2.2"})]
    wanted = (
        "ip daddr 10.96.0.9 tcp dport 80 dnat ip to numgen inc mod 2 map { 0 : 10.1.1.2 . 8000, 1 : 10.1.2.2 . 8000 }"
    )
    assert wanted in services.rules([service("10.96.0.9")], ends)
    assert "10.96.0.9" not in services.rules([service("10.96.0.9")], [])
    assert services.names([service("10.96.0.9")], ends) == {"web.ours.svc.cluster.local": ["10.96.0.9"]}


def test_a_service_without_an_address_has_the_names_of_its_pods() -> None:
    found = services.names([service("None")], [endpoints({"ip": "10.1.1.2", "hostname": "web-0"})])
    assert found == {
        "web.ours.svc.cluster.local": ["10.1.1.2"],
        "web-0.web.ours.svc.cluster.local": ["10.1.1.2"],
    }


def question(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)


def test_names_are_answered_and_others_do_not_exist() -> None:
    names = {"web.ours": ["10.96.0.9", "10.96.0.10"]}
    found = name_server.answer(question("WEB.ours", 1), names)
    assert found is not None
    assert struct.unpack_from("!4H", found) == (7, 0x8580, 1, 2)
    assert found.endswith(bytes([10, 96, 0, 10]))
    assert (name_server.answer(question("web.ours", 28), names) or b"")[3:8] == bytes([0x80, 0, 1, 0, 0])
    assert (name_server.answer(question("other", 1), names) or b"")[3] == 0x83
    assert name_server.answer(b"no question", names) is None
