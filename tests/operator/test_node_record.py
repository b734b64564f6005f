"""The record of nodes: what is written when nodes come and go, how it survives, stays bounded, and is read back."""

import asyncio
import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core import names
from bamboo_core.kube.errors import ApiError
from bamboo_core.prices.price_list import parse_prices
from bamboo_core.traces.compressed import text_of
from bamboo_core.traces.json_lines import parse_json_lines
from bamboo_core.traces.trace import Change, make_trace
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.kube.objects import ZONE
from bamboo_operator.manifests.worker_pod import worker_pod
from bamboo_operator.prices.source import PriceSource
from bamboo_operator.recording import node_record
from bamboo_operator.recording.node_record import NodeRecord, SeenNode, bounded, observed, restored, stored
from bamboo_operator.recording.recorder import NodeRecorder
from fake_api import FakeApi
from operator_kit import META, SETTINGS, job, pool

BEGAN = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
PLACE = LeaseName("bamboo-system", "bamboo-operator-nodes")
POOLS = (pool("EKS", name="spot", price_per_hour="0.91"), pool("EKS", "OnDemand", name="dear", price_per_hour="3.06"))


SPEC = replace(job(), node_pools=POOLS)


class RecordApi(FakeApi):
    """ConfigMaps. refusing: what each call is answered with instead."""

    refusing: ApiError | None = None
    writes = 0

    async def read_config_map(self, namespace, name):
        self._may()
        return self.read("configmap", name) if name in self.all("configmap") else None

    async def create_config_map(self, config_map):
        self._may()
        return self.create("configmap", config_map)

    async def replace_config_map(self, config_map):
        self._may()
        return self.replace("configmap", config_map)

    def _may(self):
        self.writes += 1
        if self.refusing is not None:
            raise self.refusing

    @property
    def trace(self):
        kept = self.all("configmap")[PLACE.name]
        text = text_of(base64.b64decode(kept["binaryData"][names.NODE_RECORD_KEY]))
        return parse_json_lines("kept", text)


class Recording:
    """A recorder over a cache, at a time that passes when it is told to."""

    def __init__(self, api=None, spec=None):
        self.api, self.spec = api or RecordApi(), spec or SPEC
        self.cache = ClusterCache()
        self.now, self.pods = BEGAN, {}
        self.restart()

    def restart(self):
        self.prices = PriceSource()
        self.recorder = NodeRecorder(
            self.cache, self.api, PLACE, lambda key: self.spec, (), lambda: self.now, self.prices
        )

    def passes(self, seconds):
        """With a look every five seconds."""

        async def turns():
            end = self.now + timedelta(seconds=seconds)
            while self.now < end:
                self.now += timedelta(seconds=5)
                await self.recorder.turn()

        asyncio.run(turns())

    def node(self, name, *, zone="a", ready="True", taints=(), uid=None, kind="ADDED"):
        metadata = {"name": name, "uid": uid or f"uid-{name}", "labels": {ZONE: zone}}
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        self.cache.node_event(kind, {"metadata": metadata, "spec": {"taints": list(taints)}, "status": status})

    def ends(self, number):
        """That worker's pod is gone."""
        self.cache.pod_event("DELETED", self.pods.pop(number))

    def worker(self, number, node, where=POOLS[0]):
        pod = worker_pod(job(), META, number, where, SETTINGS)
        pod["metadata"]["uid"] = f"pod-{number}"
        pod["spec"]["nodeName"] = node
        self.cache.pod_event("ADDED", pod)
        self.pods[number] = pod


def changes(trace):
    return [(change.at, change.change.value, change.node) for change in trace.changes]


def test_nodes_of_workers_are_recorded_with_zone_pool_notice_and_price():
    seen = Recording()
    for name, zone in (("n0", "a"), ("n1", "b"), ("other", "a"), ("dear", "a")):
        seen.node(name, zone=zone)
    seen.worker(0, "n0")
    seen.worker(1, "n1")
    seen.worker(2, "dear", POOLS[1])
    seen.passes(120)
    first = seen.api.trace
    assert [(c.change, c.node, c.zone, c.pool) for c in first.changes] == [
        (Change.ADD, "n0", "a", "spot"),
        (Change.ADD, "n1", "b", "spot"),
    ]
    assert [(p.zone, p.usd_per_hour, p.on_demand) for p in first.prices] == [("a", 0.91, 3.06), ("b", 0.91, 3.06)]
    seen.node("n1", zone="b", taints=[{"key": "aws-node-termination-handler/spot-itn"}], kind="MODIFIED")
    seen.passes(100)
    seen.node("n1", kind="DELETED")
    seen.node("other", kind="DELETED")
    seen.passes(90)
    (gone,) = seen.api.trace.changes[2:]
    assert (gone.change, gone.node, gone.zone, gone.pool) == (Change.REMOVE, "n1", "b", "spot")
    assert gone.notice == pytest.approx(100, abs=6)


def test_a_node_on_which_no_worker_was_any_more_is_no_loss():
    seen = Recording()
    for number, name in enumerate(("busy", "warned", "idle", "drained", "silent")):
        seen.node(name)
        seen.worker(number, name)
    seen.passes(3600)
    for number in (2, 3):
        seen.ends(number)
    seen.passes(60)
    scaled_down = [{"key": "ToBeDeletedByClusterAutoscaler"}]
    for name in ("warned", "drained"):
        seen.node(name, taints=scaled_down, kind="MODIFIED")
    seen.node("silent", ready="False", kind="MODIFIED")
    seen.passes(30)
    for number in (1, 4):
        seen.ends(number)
    seen.passes(30)
    for name in ("busy", "warned", "idle", "drained", "silent"):
        seen.node(name, kind="DELETED")
    seen.passes(90)
    gone = {change.node: change.idle for change in seen.api.trace.changes if change.change is Change.REMOVE}
    assert gone == {"busy": False, "warned": False, "silent": False, "idle": True, "drained": True}
    found = seen.recorder.exposures()[("spot", "a")]
    assert (found.losses, round(found.hours)) == (3, 5)
    seen.restart()
    seen.passes(30)
    assert seen.recorder.exposures()[("spot", "a")].losses == 3, "another operator goes on with the record"


def test_prices_that_are_read_are_recorded_as_they_change_by_zone():
    pool = {"name": "spot", "machine": "m", "pricePerHour": "0.91"}
    seen = Recording(spec=job(nodePools=[pool]))
    for number, zone in enumerate("ab"):
        seen.node(f"n{number}", zone=zone)
        seen.worker(number, f"n{number}")
    for spot, dear in ((0.5, 0.7), (0.6, 0.7)):
        machine = {"spot": spot, "onDemand": 2.0, "zones": {"b": {"spot": dear}}}
        told = {"format": "bamboo-prices", "version": 1, "source": "", "machines": {"m": machine}}
        seen.prices.current = parse_prices("p", told)
        seen.passes(100)
    assert [(p.zone, p.usd_per_hour) for p in seen.api.trace.prices] == [("a", 0.5), ("b", 0.7), ("a", 0.6)]


def test_a_price_is_that_of_a_node_with_all_its_workers():
    """A pool's is that of one worker; on demand the first pool counts that says one, as in a job's cost."""
    unpriced = pool("EKS", "OnDemand", name="first")
    shared = replace(SPEC.spread, workers_per_node=2)
    seen = Recording(spec=replace(SPEC, node_pools=(POOLS[0], unpriced, POOLS[1]), spread=shared))
    seen.node("n0", zone="a")
    seen.worker(0, "n0")
    seen.passes(120)
    assert [(p.usd_per_hour, p.on_demand) for p in seen.api.trace.prices] == [(1.82, 6.12)]


def test_a_node_that_fell_silent_went_at_that_time():
    seen = Recording()
    seen.node("n0")
    seen.worker(0, "n0")
    seen.passes(100)
    seen.node("n0", ready="Unknown", kind="MODIFIED")
    silent = (seen.now - BEGAN).total_seconds() + 5
    seen.passes(300)
    seen.node("n0", kind="DELETED")
    seen.passes(90)
    assert changes(seen.api.trace)[-1] == (pytest.approx(silent, abs=6), "remove", "n0")


def test_a_new_operator_goes_on_where_the_last_one_ended():
    seen = Recording()
    for name in ("n0", "n1"):
        seen.node(name)
        seen.worker(int(name[1]), name)
    seen.passes(120)
    seen.node("n0", kind="DELETED")  # while no operator looks
    seen.node("n1", uid="another", kind="MODIFIED")
    seen.restart()
    seen.passes(200)
    found = seen.api.trace
    assert [(kind, node) for _, kind, node in changes(found)] == [("add", "n0"), ("add", "n1"), ("remove", "n0")]
    assert found.duration >= 120 + 60


def test_nothing_is_gone_before_all_nodes_have_been_listed():
    seen = Recording()
    for name in ("n0", "n1", "n2"):
        seen.node(name)
        seen.worker(int(name[1]), name)
    seen.passes(120)
    nodes = dict(seen.cache.nodes)
    seen.cache.nodes.clear()
    seen.restart()
    seen.passes(120)
    for name, node in nodes.items():
        seen.cache.nodes[name] = node
        seen.passes(5)
    seen.passes(120)
    assert not [change for change in seen.api.trace.changes if change.change is Change.REMOVE]


def test_a_node_that_is_made_again_under_its_name_came_anew():
    seen = Recording()
    seen.node("n0")
    seen.worker(0, "n0")
    seen.passes(120)
    seen.node("n0", kind="DELETED")
    seen.node("n0", uid="second")
    seen.passes(120)
    assert [(kind, node) for _, kind, node in changes(seen.api.trace)] == [
        ("add", "n0"),
        ("remove", "n0"),
        ("add", "n0"),
    ]


def test_it_is_written_at_most_once_a_minute_and_not_without_need():
    seen = Recording()
    seen.node("n0")
    seen.worker(0, "n0")
    seen.passes(120)
    before = seen.api.writes
    seen.passes(600)
    assert seen.api.writes == before
    for number in range(1, 13):
        seen.node(f"n{number}")
        seen.worker(number, f"n{number}")
        seen.passes(5)
    assert seen.api.writes <= before + 2
    seen.passes(1000)
    assert seen.api.trace.duration > 1500


def test_what_cannot_be_written_is_said_once_and_written_later(caplog):
    seen = Recording()
    seen.node("n0")
    seen.worker(0, "n0")
    seen.api.refusing = ApiError(403, "Forbidden", "may not")
    seen.passes(200)
    seen.api.refusing = None
    seen.passes(100)
    assert len(seen.api.trace.changes) == 1
    seen.api.refusing = ApiError(403, "Forbidden", "may not")
    seen.node("n1")
    seen.worker(1, "n1")
    seen.passes(300)
    assert sum("cannot write the record of nodes" in line for line in caplog.messages) == 1
    seen.api.refusing = None
    seen.api.all("configmap")[PLACE.name]["metadata"]["resourceVersion"] = "changed by somebody"
    seen.passes(200)
    assert len(seen.api.trace.changes) == 2
    del seen.api.all("configmap")[PLACE.name]
    seen.node("n2")
    seen.worker(2, "n2")
    seen.passes(200)
    assert len(seen.api.trace.changes) == 3


def test_what_is_not_a_record_is_begun_anew(caplog):
    seen = Recording()
    kept = {"metadata": {"name": PLACE.name}, "binaryData": {names.NODE_RECORD_KEY: "bm90IGd6aXA="}}
    seen.api.put("configmap", kept)
    seen.node("n0")
    seen.worker(0, "n0")
    seen.passes(120)
    assert changes(seen.api.trace) == [(pytest.approx(15, abs=6), "add", "n0")]
    assert any("cannot be read, and begins anew" in line for line in caplog.messages)


@settings(max_examples=30)
@given(st.lists(st.sets(st.sampled_from("abcdefgh"), max_size=8), max_size=60), st.integers(4, 30))
def test_a_bounded_record_says_who_is_there(steps, most):
    """Its nodes are those of the whole record, and its times those since a later beginning."""
    whole = short = NodeRecord(began=1000.0)
    for number, there in enumerate(steps):
        seen = {name: SeenNode(uid=name, zone=name, price=1.0) for name in there}
        whole = observed(whole, seen, {}, 1000.0 + 10 * number)
        short = bounded(observed(short, seen, {}, 1000.0 + 10 * number), most + 20)
        assert set(short.there) == there
    assert len(short.trace.changes) + len(short.trace.prices) <= most + 20
    again = restored(stored(short, 2000.0, "x")[1], short.began)
    assert set(again.there) == set(short.there)
    assert make_trace(again.trace.changes, again.trace.prices).changes == again.trace.changes
    newest = [change for change in whole.trace.changes if change.at + 1000 > short.began]
    later = [change for change in short.trace.changes if change.at > 0]
    assert [(c.node, c.change) for c in later] == [(c.node, c.change) for c in newest][-len(later) :] or not later


def test_a_record_stays_small_enough_for_a_config_map(monkeypatch):
    monkeypatch.setattr(node_record, "MOST_BYTES", 4_000)
    record = NodeRecord(began=0.0)
    for number in range(600):
        record = observed(record, {f"node-{number * 7919 % 1000}": SeenNode(uid=str(number))}, {}, 10.0 * number)
    kept, data = stored(record, 6000.0, "x")
    assert len(data) <= 4_000
    assert 0 < kept.began < 6000.0
    assert list(kept.there) == list(record.there)


def test_what_the_operator_recorded_is_shown_and_simulated(tmp_path: Path):
    """The file that `bamboo traces fetch` writes is the text in the ConfigMap."""
    seen = Recording()
    for number in range(3):
        seen.node(f"n{number}", zone="ab"[number % 2])
        seen.worker(number, f"n{number}")
    seen.passes(1800)
    seen.node("n2", kind="DELETED")
    seen.passes(1800)
    kept = seen.api.all("configmap")[PLACE.name]["binaryData"][names.NODE_RECORD_KEY]
    file = tmp_path / "ours.jsonl"
    file.write_text(text_of(base64.b64decode(kept)))
    shown = CliRunner().invoke(app, ["traces", "show", str(file), "--output", "json"])
    assert shown.exit_code == 0, shown.output
    document = tmp_path / "job.json"
    document.write_text(
        json.dumps(
            {
                "apiVersion": "bamboo.dev/v1alpha1",
                "kind": "BambooJob",
                "metadata": {"name": "x"},
                "spec": {
                    "task": {"entrypoint": "a:b"},
                    "training": {"steps": 10**6, "globalBatchSize": 256, "microBatchSize": 8},
                    "topology": {"stages": 3},
                },
            }
        )
    )
    command = ["simulate", str(document), "--profile", "vgg-v100", "--trace", str(file), "--output", "json"]
    simulated = CliRunner().invoke(app, command)
    assert simulated.exit_code == 0, simulated.output
    mean = json.loads(simulated.stdout)[0]["mean"]
    assert mean["preemptions"] == 1
    assert mean["usd_per_hour"] == pytest.approx(0.91 * mean["nodes"] + mean["zone_usd_per_hour"])
