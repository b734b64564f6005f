"""The bytes that a simulated step and real engines send between workers, by kind, sender and receiver.

The sizes of boundary tensors are equal. Real gradients are larger by the padding of each parameter, which matters only
in small layers.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest

from bamboo.profiles.files import read_profile
from bamboo.simulation.job.zone_traffic import TrafficKind, step_transfers
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.profile import Layer, ModelProfile
from bamboo_trainer.frames import Frame, FrameKind
from bamboo_trainer.loading import load_task
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.tasks.ties import settled
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from training_job import Job

STEP = 2  # everybody is in step by then
Sent = Counter[tuple[TrafficKind, WorkerId, WorkerId]]
KINDS = {
    FrameKind.ACTIVATION: TrafficKind.BOUNDARIES,
    FrameKind.GRADIENT: TrafficKind.BOUNDARIES,
    FrameKind.CONTRIBUTION: TrafficKind.REDUCTION,
    FrameKind.RESULT: TrafficKind.REDUCTION,
    FrameKind.PARTIAL_SUM: TrafficKind.REDUCTION,
    FrameKind.KEPT_SUM: TrafficKind.REDUCTION,
    FrameKind.SYNC: TrafficKind.REPLICAS,
}


@pytest.mark.parametrize(
    ("stages", "pipelines", "replicas"),
    [
        (3, 1, 1),
        (2, 3, 1),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, 1, marks=pytest.mark.slow),
    ],
)
def test_engines_send_what_the_simulator_counts(
    stages: int, pipelines: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = bamboojob(
        task=gpt_task(context=8),
        training=training(STEP + 1, 12, 2),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "Replicas", "replicas": replicas},
    )
    job, sent = Job(document), Sent()
    send = MemoryTransport.send

    def counting(self: MemoryTransport, peer: WorkerId, frame: Frame) -> None:
        plan, address = job.state.plan, frame.address
        if plan is not None and address.step == STEP and address.kind in KINDS:
            kind = KINDS[address.kind]
            sent[kind, self.worker, peer] += sum(t.numel() * t.element_size() for t in frame.tensors)
        send(self, peer, frame)

    monkeypatch.setattr(MemoryTransport, "send", counting)
    job.run()
    assert job.state.plan is not None
    counted = Sent()
    plan = job.state.plan
    for kind, sender, receiver, size, times in step_transfers(plan, plan.target, profiled(document)):
        counted[kind, str(sender), str(receiver)] += round(size) * times
    assert sent.keys() == counted.keys()
    for way, size in sent.items():
        padded = 1.0 if way[0] is TrafficKind.BOUNDARIES else 1.06
        assert counted[way] <= size <= padded * counted[way], way


def profiled(document: dict[str, Any]) -> ModelProfile:
    """Return a profile with the sizes that the trainer measures for the job's layers and microbatches."""
    spec = parse_manifest(document)
    task = settled(load_task(spec.task.entrypoint, spec.task.config), 0)
    layers = tuple(
        Layer(
            forward=0.1,
            backward=0.1,
            parameters=size.bytes.parameters,
            optimizer=size.bytes.optimizer,
            gradients=size.bytes.gradients,
            boundary=size.bytes.boundary,
        )
        for size in measure(task, spec)
    )
    return msgspec.structs.replace(read_profile("vgg-v100"), layers=layers, samples=spec.training.micro_batch_size)
