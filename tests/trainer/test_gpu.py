"""Training on a GPU, if there is one: equal bits on any grid and after losses of workers, and memory as counted.
BAMBOO_TEST_DEVICE=cpu runs most of these tests on the CPU, and test_pretended_gpu.py on pretended GPUs.
"""

import gc
import os
import threading
from typing import Any

import pytest
import torch
from test_engine import manifest
from torch import nn

from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Cell
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.memory.estimate import measure, worker_memory
from bamboo_trainer.memory.gpus import release_cached, use
from bamboo_trainer.memory.host_copies import CudaCopies
from bamboo_trainer.stage import gradients, stage_states
from bamboo_trainer.stage.compilation import toolchain
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.training import TrainingConfig
from bamboo_trainer.worker.platform import this_platform
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, one_step, small_task, whole_state
from training_job import Fault, Job, check_same_bits

DEVICE = os.environ.get("BAMBOO_TEST_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "")
IS_PRETENDED = "PRETENDED_GPU" in os.environ
IS_REAL = DEVICE.startswith("cuda") and not IS_PRETENDED
STEPS = 6 if IS_REAL else 3
LOST_AT = STEPS - 2  # there are optimizer states, and another step comes
pytestmark = pytest.mark.skipif(not DEVICE, reason="no GPU here")


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    use(torch.device(DEVICE))
    yield
    torch.use_deterministic_algorithms(before)


def document(
    precision: str = "fp32",
    pipelines: int = 1,
    placement: str = "Device",
    tied: bool = False,
    compiled: bool = False,
    stages: int = 0,
) -> dict[str, Any]:
    """Return the manifest of a job. stages: of each pipeline; 0: four stages in all, divided among the pipelines."""
    made = manifest(stages or 4 // pipelines, pipelines, standby=1, tied=tied, steps=STEPS)
    made["spec"]["training"]["precision"] = precision.partition(" ")[0]
    if precision == "bf16 parameters":
        made["spec"]["training"]["parameterPrecision"] = "bf16"
    made["spec"]["training"]["compile"] = compiled
    made["spec"]["redundancy"]["placement"] = placement
    return made


@pytest.mark.parametrize("pipelines", [1, 2])
def test_trains_as_on_the_cpu(pipelines: int) -> None:
    there = Job(document(pipelines=pipelines), devices=(DEVICE,)).run()
    here = Job(document(pipelines=pipelines)).run()
    assert there.outcome is Outcome.COMPLETE
    # Dropout draws other numbers on a GPU.
    torch.testing.assert_close(
        list(there.state.progress.losses.values()), list(here.state.progress.losses.values()), rtol=0.1, atol=0.1
    )


@pytest.mark.parametrize("placement", ["Device", "Host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 parameters", "fp16"])
@pytest.mark.parametrize(("pipelines", "tied"), [(1, False), (1, True), (2, False)])
def test_a_loss_changes_no_bit(precision: str, placement: str, pipelines: int, tied: bool) -> None:
    job = document(precision, pipelines, placement, tied)
    calm = Job(job, devices=(DEVICE,)).run()
    at = [f for f in dict.fromkeys(calm.executed) if f.step == LOST_AT and f.cell == Cell(0, 1) and not f.after]
    names = {"Forward", "Backward", "ReduceGradients", "SyncReplicas", "OptimizerStep"}
    chosen = {f.name: f for f in at if f.name in names}
    assert {"Forward", "Backward"} <= chosen.keys()
    for fault in chosen.values():
        check_same_bits(calm, Job(job, (fault,), devices=(DEVICE,)).run())


def leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, stage_states):
        monkeypatch.setattr(module, "has_room", lambda device, size: False)


@pytest.mark.parametrize("pipelines", [pytest.param(1, id="alone"), 2])
def test_a_gpu_without_room_for_sums_and_states_comes_to_the_same_bits(
    pipelines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = document("bf16", pipelines)
    calm = Job(job, devices=(DEVICE,)).run()
    leave_no_room(monkeypatch)
    check_same_bits(calm, Job(job, devices=(DEVICE,)).run())
    at = [f for f in calm.executed if f.step == LOST_AT and f.cell == Cell(0, 1) and not f.after]
    for name in {"Backward", "SyncReplicas"} | {"ReduceGradients"} & {f.name for f in at}:
        fault = [f for f in at if f.name == name][-1]
        check_same_bits(calm, Job(job, (fault,), devices=(DEVICE,)).run())


@pytest.mark.parametrize(
    ("cells", "precision", "norm", "marked"),
    [(1, "fp32", 1.0, 0), (1, "bf16", None, 0), (1, "bf16", None, 16), (2, "bf16", 1.0, 0)],
)
def test_a_gpu_without_room_holds_no_more_than_is_counted(
    cells: int, precision: str, norm: float | None, marked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU holds one gradient sum for each cell of the stage, whatever the number of groups, and the tensors of one
    running layer. The peak is in a backward, unless the norm needs a copy of the gradient. Casts of all layers count
    only if no layer is checkpointed.
    """
    leave_no_room(monkeypatch)
    monkeypatch.setattr(gradients, "PIECE", 1 << 10)
    width, points = 96, torch.randn(64, 96)
    task = small_task(
        layers=(lambda: nn.Linear(width, width),) * 16,
        dataset=TensorDataset((points,), (points,)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        checkpointed=range(marked),
    )
    asked = training(3, 32, 1, precision=precision, maxGradientNorm=norm)
    topology = {"stages": 1, "pipelines": cells}
    spec = parse_manifest(bamboojob(task={"entrypoint": "m:build"}, training=asked, topology=topology))
    sizes = measure(task, spec)
    _, counted = worker_memory(sizes, ((0, 16),), spec, taken_over=True)
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    config = TrainingConfig.of(spec.training)
    stage = build_stage(task, 0, [(0, 16)], config, DEVICE, copies=CudaCopies(torch.device(DEVICE), lambda: None))
    stage.values.park(cells > 1)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    share = 32 // cells
    for step in range(2):
        works = [stage.begin(range(share * c, share * (c + 1)), range(0, 33, 2)) for c in range(cells)]
        for m in range(share):
            for c, work in enumerate(works):
                stage.forward(work, step, share * c + m, None)
                stage.backward(work, step, share * c + m, None)
        ((_, final),) = works[0].gradients.nodes()
        for work in works:
            work.gradients.drop()
        stage.values.apply(final[: stage.values.size], 2.0)
        del final
    held = torch.cuda.max_memory_allocated(DEVICE) - before
    needed = counted.total - counted.log - counted.copies
    layer = sizes[0].bytes.parameters + sizes[0].bytes.gradients + sizes[0].casts
    assert 0.8 * needed < held <= needed + 2 * layer


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("placement", ["Device", "Host"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_worker_with_two_gpus_has_the_bits_of_one_and_keeps_them_after_a_loss(placement: str, tied: bool) -> None:
    one = Job(document(placement=placement, tied=tied), devices=(DEVICE,)).run()
    job = document(placement=placement, tied=tied, stages=2)
    job["spec"]["topology"]["schedule"] = "ZBH1"
    devices = ("cuda:0", "cuda:1")
    calm = Job(job, devices=devices, per_worker=2).run()
    check_same_bits(one, calm)
    for name in ("Forward", "BackwardWeight"):
        fault = next(f for f in calm.executed if f.name == name and f.step == LOST_AT and f.cell == Cell(0, 2))
        check_same_bits(calm, Job(job, (fault,), devices=devices, per_worker=2).run())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_between_two_gpus_of_a_worker_do_not_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    came = list[str]()

    def note(name: str) -> None:
        made = getattr(CudaCopies, name)

        def noted(*given: Any) -> Any:
            came.append(name)
            return made(*given)

        monkeypatch.setattr(CudaCopies, name, noted)

    note("_bring_across")
    note("_bring_from_host")
    job = bamboojob(
        task={"entrypoint": "sharing_tasks:build", "config": {"sharing": "frozen"}},
        training=training(2, 12, 3),
        topology={"stages": 1},
    )
    Job(job, devices=("cuda:0", "cuda:1"), per_worker=2).run()
    assert came.count("_bring_across") == 2 * 2 * 4, "an activation and a gradient of each step and microbatch"
    assert came.count("_bring_from_host") == 2 * 2 * 4 + 2 * 4, "inputs and targets; all twice in a spot check"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus_share_what_nobody_trains() -> None:
    job = bamboojob(
        task={"entrypoint": "sharing_tasks:build", "config": {"sharing": "frozen"}},
        training=training(3, 12, 3),
        topology={"stages": 2},
    )
    calm = Job(job, devices=("cuda:0", "cuda:1"), per_worker=2).run()
    fault = Fault("Backward", Cell(0, 2), 1, 1)
    check_same_bits(calm, Job(job, (fault,), devices=("cuda:0", "cuda:1"), per_worker=2).run())


def test_steps_are_counted_where_the_kernel_of_a_restored_state_wants_it() -> None:
    """A fused kernel's step counts are restored to the device, and other kernels' to the host."""

    def stage(**says: bool) -> Stage:
        task = small_task(optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1, **says))
        return build_stage(task, 0, [(0, 3)], CONFIG, DEVICE)

    def counted(stage: Stage) -> set[str]:
        return {t.device.type for name, t in stage.values.optimizer.named() if name.endswith(":step")}

    fused, before, restored = stage(), stage(foreach=False), stage()
    for one in (fused, before):
        one_step([one], 0)
    for kept, where in ((before, "cpu"), (fused, torch.device(DEVICE).type), (before, "cpu")):
        restored.values.restore(whole_state(kept))
        assert counted(restored) == counted(kept) == {where}
    assert one_step([restored], 1) == one_step([before], 1)
    assert restored.values.digest() == before.values.digest()


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(IS_PRETENDED or toolchain(gpu=IS_REAL).lacks != "", reason="nothing to compile with")
@pytest.mark.parametrize("placement", ["Device", "Host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_layers_have_the_same_bits_on_another_grid_and_after_a_loss(precision: str, placement: str) -> None:
    calm = Job(document(precision, placement=placement, compiled=True), devices=(DEVICE,)).run()
    fault = Fault("Backward", Cell(0, 1), LOST_AT, 1)
    job = document(precision, 2, placement, compiled=True)
    check_same_bits(calm, Job(job, (fault,), devices=(DEVICE,)).run())


@pytest.mark.skipif(not IS_REAL, reason="others have none of it")
def test_a_gpu_says_what_decides_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_DEVICE", DEVICE)
    found = this_platform("w0")
    assert found.device == torch.cuda.get_device_name(DEVICE)
    assert all(character.isdigit() or character in ". forCUDA" for character in found.driver)
    assert found.driver
    assert found.cuda.startswith(str(torch.version.cuda))


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="a CPU pins nothing")
def test_pinned_memory_ends_where_it_is_told_to_and_is_returned() -> None:
    copies = CudaCopies(torch.device(DEVICE), lambda: None, pinned_bytes=3 << 20)
    made = [copies.start([torch.ones(1 << 18, device=DEVICE)]).wait()[0] for _ in range(4)]
    assert [copy.is_pinned() for copy in made] == [True, True, True, False]
    del made
    assert copies.start([torch.ones(1 << 18, device=DEVICE)]).wait()[0].is_pinned()
    release_cached()


@pytest.mark.skipif(not IS_REAL, reason="a CPU's tensors are their own copies, and a pretended GPU is never busy")
def test_a_copy_is_under_way_while_the_device_works_and_has_what_was_there_when_it_was_started() -> None:
    told = threading.Event()
    copies, tensor = CudaCopies(torch.device(DEVICE), told.set), torch.ones(1 << 20, device=DEVICE)
    torch.cuda._sleep(1 << 30)  # the device is busy: what is copied is behind it
    tensor.add_(1.0)
    copy = copies.start([tensor])
    assert not copy.ready()
    assert told.wait(60.0)
    assert copy.ready()
    (there,) = copy.wait()
    assert there.is_pinned()
    assert there.eq(2.0).all()
