"""Users' pod templates: their effect, ignored fields, and the fields that only the operator sets."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core import names
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.pod_templates import merge, placement
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, template_problems, worker_pod
from operator_kit import GPU, JOB_UID, OWN_ENV, POOLS, SETTINGS, TEMPLATE, check_pod, job, pool, render, trainer


def test_a_template_changes_security_images_volumes_and_environment():
    pod = render(
        image="mine:1",
        template={
            "spec": {
                "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
                "terminationGracePeriodSeconds": 90,
                "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}],
                "containers": [
                    {
                        "name": "trainer",
                        "image": "mine:2",
                        "env": [{"name": "HOME", "value": "/h"}, {"name": "IP", "value": "$(POD_IP)"}],
                        "securityContext": {"readOnlyRootFilesystem": False},
                    }
                ],
            }
        },
    )
    spec = pod["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "fsGroup": 2000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["volumes"][0] == {"name": "tmp", "emptyDir": {"medium": "Memory"}}
    assert trainer(pod)["image"] == "mine:2"
    assert [e["name"] for e in trainer(pod)["env"]] == [*OWN_ENV, "HOME", "USER", "BAMBOO_METRICS_PORT", "IP"]
    assert trainer(pod)["securityContext"]["allowPrivilegeEscalation"] is False
    assert template_problems(job(worker={"template": TEMPLATE})) == []
    kept = render(template=TEMPLATE)
    assert (kept["spec"]["schedulerName"], kept["spec"]["priorityClassName"]) == ("volcano", "high")
    assert [c["name"] for c in kept["spec"]["containers"]] == ["trainer", "side"]
    assert [v["name"] for v in kept["spec"]["volumes"]] == ["tmp", "data", "bamboo-token"]


def test_null_takes_a_default_away():
    pod = render(template={"spec": {"securityContext": {"runAsUser": None}, "topologySpreadConstraints": None}})
    assert "runAsUser" not in pod["spec"]["securityContext"]
    assert "topologySpreadConstraints" not in pod["spec"]
    check_pod(pod)
    assert (
        "runAsUser"
        not in render(settings=WorkerPodSettings(coordinator_url="ws://x", image="i", run_as_user=None))["spec"][
            "securityContext"
        ]
    )


T = "worker.template"
SPEC = f"{T}.spec"
BY_OPERATOR = "ignored, it is set by the operator"
TRAINER = f"{SPEC}.containers[trainer]"


def own(**container):
    return {"spec": {"containers": [{"name": "trainer", **container}]}}


VAIN = [
    ({"metadata": {"name": "x"}}, f"{T}.metadata.name: {BY_OPERATOR}"),
    ({"metadata": {"ownerReferences": []}}, f"{T}.metadata.ownerReferences: {BY_OPERATOR}"),
    ({"metadata": {"labels": {"bamboo.dev/job-uid": "x"}}}, f"{T}.metadata.labels.bamboo.dev/job-uid: {BY_OPERATOR}"),
    (
        {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "x"}}},
        f"{T}.metadata.labels.kueue.x-k8s.io/queue-name: {BY_OPERATOR}",
    ),
    (
        {"metadata": {"labels": {"kueue.x-k8s.io/priority-class": "x"}}},
        f"{T}.metadata.labels.kueue.x-k8s.io/priority-class: {BY_OPERATOR}",
    ),
    ({"spec": {"restartPolicy": "Always"}}, f"{SPEC}.restartPolicy: {BY_OPERATOR}"),
    (
        {"spec": {"volumes": [{"name": "bamboo-token", "emptyDir": {}}]}},
        f"{SPEC}.volumes[bamboo-token]: {BY_OPERATOR}",
    ),
    *((own(env=[{"name": n, "value": "x"}]), f"{TRAINER}.env[{n}]: {BY_OPERATOR}") for n in OWN_ENV),
    *(
        (
            own(volumeMounts=[{"name": "v", "mountPath": path}]),
            f"{TRAINER}.volumeMounts[{path}]: {BY_OPERATOR}",
        )
        for path in ("/var/run/secrets/bamboo.dev", "/var/run/secrets", "/var/run/secrets/bamboo.dev/token", "/")
    ),
    ({"kind": "Pod"}, f"{T}.kind: ignored, it is not part of a pod template"),
    ({"spec": 5}, f"{SPEC}: ignored, expected an object"),
    ({"spec": {"containers": {"trainer": {}}}}, f"{SPEC}.containers: ignored, expected a list of objects"),
    ({"spec": {"containers": ["trainer"]}}, f"{SPEC}.containers: ignored, expected a list of objects"),
    ({"spec": {"containers": [{"image": "x"}]}}, f"{SPEC}.containers: ignored, expected every item to have a name"),
    (own(env="x"), f"{SPEC}.containers[0].env: ignored, expected a list of objects"),
    ({"spec": {"nodeSelector": "x"}}, f"{SPEC}.nodeSelector: ignored, expected an object"),
    ({"spec": {"affinity": {"nodeAffinity": [1]}}}, f"{SPEC}.affinity.nodeAffinity: ignored, expected an object"),
    ({"spec": {"tolerations": ["all"]}}, f"{SPEC}.tolerations: ignored, expected a list of objects"),
    ({"metadata": {"labels": ["a"]}}, f"{T}.metadata.labels: ignored, expected an object"),
    (
        {"spec": {"nodeSelector": {"cloud.google.com/gke-spot": "false"}}},
        f"{SPEC}.nodeSelector.cloud.google.com/gke-spot: ignored in node pool p, whose preset sets it to true",
    ),
]


@pytest.mark.parametrize(("template", "problem"), VAIN)
def test_what_a_user_overrides_in_vain(template, problem):
    gke = pool("GKE")
    spec = {"queue": {"name": "q", "priorityClass": "high"}, "nodePools": [{"name": "p", "preset": "GKE"}]}
    before = copy.deepcopy(template)
    assert template_problems(job(**spec, worker={"template": template})) == [problem]
    assert template == before
    assert render(spec, where=gke, template=template) == render(spec, where=gke)


NAMES = st.sampled_from(["trainer", "bamboo-token", "tmp", "BAMBOO_WORKER", "POD_IP", "a", "b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "env", "volumes", "volumeMounts", "mountPath", "value", "securityContext", "affinity", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": VALUES
        | st.fixed_dictionaries({}, optional={"labels": VALUES, "annotations": VALUES, "name": VALUES}),
        "spec": VALUES
        | st.fixed_dictionaries(
            {},
            optional={
                "containers": VALUES | st.lists(st.fixed_dictionaries({"name": NAMES}, optional={"env": VALUES})),
                "volumes": VALUES | st.lists(st.fixed_dictionaries({"name": NAMES})),
                "restartPolicy": VALUES,
                "nodeSelector": VALUES,
                "hostNetwork": VALUES,
                "tolerations": VALUES,
                "affinity": VALUES | st.fixed_dictionaries({"nodeAffinity": VALUES}),
            },
        ),
    },
)


@given(TEMPLATES, st.sampled_from(POOLS))
def test_no_template_breaks_what_the_operator_owns(template, where):
    document = {"task": {"entrypoint": "m:build"}, "topology": {"stages": 2}}
    training = {"steps": 10, "globalBatchSize": 8, "microBatchSize": 2}
    spec = parse_manifest(
        {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": "tiny"},
            "spec": {**document, "training": training, "worker": {"template": template}},
        }
    )
    pod, bare = worker_pod(spec, JOB_UID, 3, where, SETTINGS), render(where=where)
    assert all(isinstance(problem, str) and problem.startswith(T) for problem in template_problems(spec))
    assert pod["metadata"]["name"] == "tiny-w3"
    assert pod["metadata"]["ownerReferences"] == bare["metadata"]["ownerReferences"]
    owned = {k: v for k, v in bare["metadata"]["labels"].items() if k.startswith("bamboo.dev/")}
    del owned[names.LABEL_WORKER_REVISION]  # follows from the template
    assert owned.items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["restartPolicy"] == "Never"
    assert [v for v in pod["spec"]["volumes"] if v["name"] == "bamboo-token"] == bare["spec"]["volumes"][-1:]
    env = trainer(pod)["env"]
    assert env[:5] == trainer(bare)["env"][:5]
    assert not {e.get("name") for e in env[5:]} & set(OWN_ENV)
    assert trainer(pod)["volumeMounts"][-1] == trainer(bare)["volumeMounts"][-1]
    assert placement(spec, where).selector.items() <= pod["spec"].get("nodeSelector", {}).items()


JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=4),
    max_leaves=10,
)
MAPS = st.dictionaries(st.sampled_from("abcdef"), JSON, max_size=4)


@given(MAPS, MAPS)
def test_merging_changes_neither_side_and_repeats_to_the_same(base, override):
    before = copy.deepcopy((base, override))
    merged = merge(base, override)
    assert (base, override) == before
    assert merge(merged, override) == merged
    assert merge(base, {}) == base
    assert merge({}, override) == override
    assert merged.keys() == base.keys() | override.keys()


def test_lists_of_named_things_are_merged_by_name_and_others_replaced():
    assert merge({"args": [1, 2]}, {"args": [3]}) == {"args": [3]}
    assert merge({"env": [{"name": "a", "value": "1"}, {"name": "b"}]}, {"env": [{"name": "a", "valueFrom": {}}]}) == {
        "env": [{"name": "a", "valueFrom": {}}, {"name": "b"}]
    }
    assert merge({"containers": [{"name": "a", "x": 1}]}, {"containers": [{"name": "b"}, {"name": "a", "y": 2}]}) == {
        "containers": [{"name": "a", "x": 1, "y": 2}, {"name": "b"}]
    }


def test_a_pools_template_is_merged_over_that_of_all_workers():
    all_workers = {
        "spec": {
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "nodeSelector": {"disk": "ssd"},
            "containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
        }
    }
    of_pool = {
        "spec": {
            "nodeSelector": {"disk": None, "gpu": "l4"},
            "containers": [
                {
                    "name": "trainer",
                    "image": "small:1",
                    "env": [{"name": "B", "value": "2"}],
                    "resources": {"limits": {"nvidia.com/gpu": None, "nvidia.com/mig-3g.40gb": 1}},
                }
            ],
        }
    }
    where = pool("GKE", template=of_pool)
    pod = render(where=where, template=all_workers, resources=GPU, image="big:1")
    check_pod(pod)
    asked = trainer(pod)
    assert asked["image"] == "small:1"
    assert asked["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/mig-3g.40gb": 1}
    assert [(e["name"], e["value"]) for e in asked["env"] if e["name"] in "AB"] == [("A", "1"), ("B", "2")]
    selector = {"kubernetes.io/os": "linux", "gpu": "l4", "cloud.google.com/gke-spot": "true"}
    assert pod["spec"]["nodeSelector"] == selector
    tolerated = [one["key"] for one in pod["spec"]["tolerations"]]
    assert tolerated == ["team", "cloud.google.com/gke-spot", "nvidia.com/mig-3g.40gb"]
    assert trainer(render(where=pool("GKE"), template=all_workers, resources=GPU, image="big:1"))["image"] == "big:1"


def test_what_a_pools_template_says_in_vain_is_told_with_the_pool():
    template = {"spec": {"restartPolicy": "Always", "hostNetwork": True}}
    pools = [{"name": "a"}, {"name": "l4", "template": template}]
    vain, network = template_problems(job(nodePools=pools))
    assert vain == "nodePools[l4].template.spec.restartPolicy: ignored, it is set by the operator"
    assert network.startswith("nodePools[l4].template.spec.hostNetwork: takes effect")
    spec = job(nodePools=pools)
    policies = [worker_pod(spec, JOB_UID, 0, one, SETTINGS)["spec"].get("dnsPolicy") for one in spec.node_pools]
    assert policies == [None, "ClusterFirstWithHostNet"]
