"""The worker's pod: valid on every supported Kubernetes, restricted, and scheduled where it belongs."""

import copy
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import worker_name
from bamboo_operator.manifests.spread import zone_group
from bamboo_operator.manifests.worker_pod import (
    HOST_NETWORK,
    network_policy,
    template_problems,
    worker_pod,
    worker_pool,
    worker_revision,
)
from operator_kit import GPU, JOB_UID, POOLS, SETTINGS, TEMPLATE, check_pod, job, pool, render, trainer


def restricted(pod):
    """Check the pod against the restricted Pod Security Standard, as far as it concerns workers' pods."""
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"].get("runAsUser") != 0
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all(v.keys() & {"emptyDir", "projected", "persistentVolumeClaim"} for v in spec["volumes"])
    context = trainer(pod)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["readOnlyRootFilesystem"] is True
    assert not context.get("privileged")


SPECS = [
    {},
    {"queue": {"name": "q"}},
    {"spread": {"policy": "SingleZone"}},
    {"spread": {"policy": "ZonePerPipeline"}, "topology": {"stages": 2, "pipelines": 3}},
    {"nodePools": [{"name": "p", "preset": "GKE"}]},
]
WORKERS = [{}, {"image": "mine:2", "resources": GPU}, {"template": TEMPLATE}, {"resources": GPU, "template": TEMPLATE}]


@pytest.mark.parametrize("where", POOLS, ids=lambda p: f"{p.preset}-{p.capacity}" if p else "any")
def test_every_pod_is_valid_and_restricted(where):
    for spec, worker in product(SPECS, WORKERS):
        pod = render(spec, where=where, **worker)
        check_pod(pod)
        restricted(pod)
        assert pod == render(spec, where=where, **copy.deepcopy(worker))


@pytest.mark.parametrize("version", ["1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36"])
def test_older_versions_take_it_too(version):
    for where in (pool("GKE"), pool("AKS", "OnDemand")):
        check_pod(render(SPECS[1], where=where, **WORKERS[3]), version)


def test_the_whole_pod_of_the_smallest_job():
    labels = {
        "app.kubernetes.io/name": "bamboo-worker",
        "app.kubernetes.io/instance": "tiny",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/part-of": "bamboo",
        "app.kubernetes.io/managed-by": "bamboo-operator",
        "bamboo.dev/job-name": "tiny",
        "bamboo.dev/job-uid": JOB_UID,
        "bamboo.dev/worker-index": "3",
        "bamboo.dev/worker-revision": worker_revision(job(), JOB_UID, None, SETTINGS),
    }
    of_job = {"matchLabels": {"bamboo.dev/job-uid": JOB_UID}}
    over_nodes = {"labelSelector": of_job, "topologyKey": "kubernetes.io/hostname"}
    assert render() == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "tiny-w3",
            "namespace": "default",
            "labels": labels,
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
            "ownerReferences": [
                {
                    "apiVersion": "bamboo.dev/v1alpha1",
                    "kind": "BambooJob",
                    "name": "tiny",
                    "uid": JOB_UID,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": of_job,
                }
            ],
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": over_nodes}]
                }
            },
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {
                    "name": "bamboo-token",
                    "projected": {
                        "sources": [
                            {
                                "serviceAccountToken": {
                                    "audience": "bamboo.dev",
                                    "expirationSeconds": 3600,
                                    "path": "token",
                                }
                            }
                        ]
                    },
                },
            ],
            "containers": [
                {
                    "name": "trainer",
                    "image": "trainer:1",
                    "command": ["python", "-m", "bamboo_trainer"],
                    "env": [
                        {"name": "BAMBOO_WORKER", "value": "tiny-w3"},
                        {"name": "BAMBOO_COORDINATOR", "value": SETTINGS.coordinator_url},
                        {"name": "BAMBOO_TOKEN_FILE", "value": "/var/run/secrets/bamboo.dev/token"},
                        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {"name": "BAMBOO_GRACE_SECONDS", "value": "30"},
                        {"name": "HOME", "value": "/tmp"},
                        {"name": "USER", "value": "bamboo"},
                        {"name": "BAMBOO_METRICS_PORT", "value": "8080"},
                    ],
                    "ports": [{"name": "metrics", "containerPort": 8080}],
                    "resources": {},
                    "volumeMounts": [
                        {"name": "tmp", "mountPath": "/tmp"},
                        {"name": "bamboo-token", "mountPath": "/var/run/secrets/bamboo.dev", "readOnly": True},
                    ],
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                }
            ],
        },
    }


@pytest.mark.parametrize(
    ("preset", "capacity", "labels", "expressions", "tolerated"),
    [
        ("EKS", "Spot", {"eks.amazonaws.com/capacityType": "SPOT"}, [], []),
        ("EKS", "OnDemand", {"eks.amazonaws.com/capacityType": "ON_DEMAND"}, [], []),
        ("Karpenter", "Spot", {"karpenter.sh/capacity-type": "spot"}, [], []),
        ("Karpenter", "OnDemand", {}, [("karpenter.sh/capacity-type", "In", ["on-demand", "reserved"])], []),
        ("GKE", "Spot", {"cloud.google.com/gke-spot": "true"}, [], ["cloud.google.com/gke-spot"]),
        (
            "GKE",
            "OnDemand",
            {},
            [
                ("cloud.google.com/gke-spot", "NotIn", ["true"]),
                ("cloud.google.com/gke-preemptible", "NotIn", ["true"]),
            ],
            [],
        ),
        (
            "AKS",
            "Spot",
            {"kubernetes.azure.com/scalesetpriority": "spot"},
            [],
            ["kubernetes.azure.com/scalesetpriority"],
        ),
        ("AKS", "OnDemand", {}, [("kubernetes.azure.com/scalesetpriority", "NotIn", ["spot"])], []),
        ("None", "Spot", {}, [], []),
        ("None", "OnDemand", {}, [], []),
    ],
)
def test_presets_select_and_tolerate_their_clouds_nodes(preset, capacity, labels, expressions, tolerated):
    expected = [{"key": k, "operator": o, "values": v} for k, o, v in expressions]
    for template in ({}, TEMPLATE):
        pod = render(where=pool(preset, capacity), template=template)
        spec, users = pod["spec"], template.get("spec", {})
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", **users.get("nodeSelector", {}), **labels}
        ours = [t for t in spec.get("tolerations", []) if t not in users.get("tolerations", [])]
        assert [t["key"] for t in ours] == tolerated
        node_affinity = spec["affinity"].get("nodeAffinity", {})
        terms = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
        if expected:
            assert len(terms) == (2 if template else 1)
            assert all(term["matchExpressions"][-len(expected) :] == expected for term in terms)
        assert pod["metadata"]["labels"]["bamboo.dev/capacity-type"] == capacity
        assert worker_pool(pod) == "p"


def test_devices_are_tolerated():
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in render(resources=GPU)["spec"]["tolerations"]
    assert trainer(render(resources=GPU))["resources"] == {"limits": {"nvidia.com/gpu": "1", "memory": "16Gi"}}


def test_metrics_have_a_port_unless_the_network_is_the_hosts():
    own = {"containers": [{"name": "trainer", "ports": [{"containerPort": 9000}]}]}
    assert trainer(render(template={"spec": own}))["ports"][1:] == [{"containerPort": 9000}]
    shared = render(template={"spec": {"hostNetwork": True, **own}})
    assert trainer(shared)["ports"] == [{"containerPort": 9000}]


@pytest.mark.parametrize(
    ("asked", "selector"),
    [
        ({"disk": "ssd"}, {"kubernetes.io/os": "linux", "disk": "ssd"}),
        ({"kubernetes.io/os": "other"}, {"kubernetes.io/os": "other"}),
        ({"kubernetes.io/os": None}, {}),
        (None, {}),
    ],
)
def test_workers_run_on_linux_unless_the_template_says_otherwise(asked, selector):
    for where in (None, pool("EKS")):
        pod = render(where=where, template={"spec": {"nodeSelector": asked}})
        check_pod(pod)
        ours = {"eks.amazonaws.com/capacityType": "SPOT"} if where else {}
        assert pod["spec"].get("nodeSelector", {}) == {**selector, **ours}


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ({}, None),
        ({"hostNetwork": False}, None),
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
        ({"hostNetwork": True, "dnsPolicy": None}, None),
    ],
)
def test_on_the_hosts_network_workers_still_know_the_names_of_services(spec, policy):
    template = {"spec": spec}
    pod = render(template=template)
    check_pod(pod)
    assert pod["spec"].get("dnsPolicy") == policy
    said = template_problems(job(worker={"template": template}))
    assert said == ([f"worker.template.{HOST_NETWORK}"] if spec.get("hostNetwork") else [])


def test_a_volume_claim_is_mounted():
    claim = {"storage": "pvc://kept"}
    pod = render({"checkpoint": claim})
    check_pod(pod)
    restricted(pod)
    volume = {"name": "bamboo-storage", "persistentVolumeClaim": {"claimName": "kept"}}
    assert volume in pod["spec"]["volumes"]
    assert {"name": "bamboo-storage", "mountPath": "/var/lib/bamboo"} in trainer(pod)["volumeMounts"]
    assert pod["spec"]["securityContext"]["fsGroup"] == 65532


def test_a_queue_is_named_in_labels():
    pod = render({"queue": {"name": "q", "priorityClass": "high"}})
    asked = {key: value for key, value in pod["metadata"]["labels"].items() if "kueue" in key}
    assert asked == {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"}


def test_a_job_in_one_zone_asks_for_the_zone_of_its_other_pods():
    spec = render({"spread": {"policy": "SingleZone"}})["spec"]
    assert "topologySpreadConstraints" not in spec
    of_job = {"matchLabels": {"bamboo.dev/job-uid": JOB_UID}}
    required = [{"labelSelector": of_job, "topologyKey": "topology.kubernetes.io/zone"}]
    assert spec["affinity"]["podAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": required}
    nodes = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in nodes] == ["kubernetes.io/hostname"]


def test_pods_that_share_nodes_ask_for_nodes_that_have_some_already():
    spec = render({"spread": {"workersPerNode": 4}})["spec"]
    assert list(spec["affinity"]) == ["podAffinity"]
    (near,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    affinity = render({"spread": {"workersPerNode": 4, "policy": "SingleZone"}})["spec"]["affinity"]
    assert list(affinity) == ["podAffinity"]
    assert len(affinity["podAffinity"]) == 2
    affinity = render({"spread": {"workersPerNode": 4, "policy": "ZonePerPipeline"}})["spec"]["affinity"]
    (others,) = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert others["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"


@pytest.mark.parametrize("policy", list(SpreadPolicy))
def test_a_node_never_gets_more_of_a_jobs_pods_than_it_has_room_for(policy):
    """With fewer nodes than minDomains the scheduler counts the minimum as 0, so maxSkew bounds each node's pods."""
    alone = render({"spread": {"policy": policy.value}})["spec"].get("topologySpreadConstraints", [])
    assert all(one["whenUnsatisfiable"] == "ScheduleAnyway" for one in alone)
    pod = render({"spread": {"workersPerNode": 4, "policy": policy.value}})
    check_pod(pod)
    *others, cap = pod["spec"]["topologySpreadConstraints"]
    assert others == alone
    assert cap == {
        "maxSkew": 4,
        "minDomains": 1_000_000,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"bamboo.dev/job-uid": JOB_UID}},
    }


def test_pods_are_made_in_as_many_groups_as_there_are_pipelines():
    """Each group's pods share a zone, apart from other groups; a group that has lost a pod gets the next one."""
    wanted = job(spread={"policy": "ZonePerPipeline"}, topology={"stages": 2, "pipelines": 2})
    pods = {}
    for number in range(4):
        pods[number] = worker_pod(wanted, JOB_UID, number, None, SETTINGS, zone_group(wanted, pods.values()))
    assert [pod["metadata"]["labels"]["bamboo.dev/zone-group"] for pod in pods.values()] == ["0", "1", "0", "1"]
    affinity = pods[1]["spec"]["affinity"]
    (mine,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert mine["labelSelector"]["matchLabels"]["bamboo.dev/zone-group"] == "1"
    others = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][-1]["podAffinityTerm"]
    assert others["labelSelector"]["matchExpressions"][0]["values"] == ["1"]
    assert others["topologyKey"] == mine["topologyKey"] == "topology.kubernetes.io/zone"
    assert zone_group(wanted, [pods[0], pods[1], pods[2]]) == 1
    digests = {pod["metadata"]["labels"]["bamboo.dev/worker-revision"] for pod in pods.values()}
    assert len(digests) == 1, "a rollout would replace them for their group"


def test_pods_of_a_grid_that_is_chosen_are_in_no_group():
    """Without a known number of pipelines pods have no zone group; with one pipeline at most, all share one."""
    topology, elastic = {}, {"maxWorkers": 8}
    chosen = render({"spread": {"policy": "ZonePerPipeline"}, "topology": topology, "elastic": elastic})
    mixed = render({"spread": {"policy": "Interleave"}, "topology": topology, "elastic": elastic})
    assert (chosen["spec"], chosen["metadata"]["labels"]) == (mixed["spec"], mixed["metadata"]["labels"])
    topology = {"pipelines": 1}
    one = render({"spread": {"policy": "ZonePerPipeline"}, "topology": topology, "elastic": elastic})
    assert "requiredDuringSchedulingIgnoredDuringExecution" in one["spec"]["affinity"]["podAffinity"]
    assert one["metadata"]["labels"]["bamboo.dev/zone-group"] == "0"


# Names


@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), st.integers(0, 10**6))
def test_names_are_labels_and_tell_incarnations_apart(name, number):
    found = worker_name(name, number)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", found)
    assert len(found) <= 63
    assert found.endswith(f"-w{number}")
    assert found != worker_name(name, number + 1)


def test_long_names_do_not_collide():
    assert worker_name("a" * 62 + "b", 1) != worker_name("a" * 62 + "c", 1)
    pod = worker_pod(job("a" * 63), JOB_UID, 1, None, SETTINGS)
    assert pod["metadata"]["labels"]["bamboo.dev/job-name"] == "a" * 63
    check_pod(pod)


def test_only_workers_of_the_job_connect_to_its_workers_and_whoever_reads_metrics() -> None:
    spec: JobSpec = job()
    workers = {"matchLabels": {"bamboo.dev/job-uid": "uid-1"}}
    owner = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "name": spec.name,
        "uid": "uid-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert network_policy(spec, "uid-1") == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": "bamboo-uid-1",
            "namespace": spec.namespace,
            "labels": {"app.kubernetes.io/managed-by": "bamboo-operator", "app.kubernetes.io/instance": spec.name},
            "ownerReferences": [owner],
        },
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": 8080}]},
            ],
        },
    }
