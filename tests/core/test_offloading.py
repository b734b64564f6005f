"""Which microbatches' activations wait in host memory."""

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import LEAST_ON_DEVICE, PipelineSchedule
from bamboo_core.planning.offloading import BUS, kept_on_device, most_on_device, waits_on_host
from bamboo_core.planning.schedule import Backward, BackwardInput, Forward, StageOrder
from bamboo_core.planning.steps.step_times import StepModel
from bamboo_core.planning.steps.worker_memory import device_bytes
from job_simulation_kit import manifest, profile

ORDERS = st.builds(StageOrder, st.sampled_from(PipelineSchedule), st.integers(0, 3), st.booleans())


def test_all_stay_where_as_many_may_or_nothing_is_said() -> None:
    program = StageOrder(lookahead=0).program(0, 4, range(8))
    assert waits_on_host(program, None) == waits_on_host(program, 4) == {}
    assert (most_on_device(program, None), most_on_device(program, 4), most_on_device(program, 3)) == (4, 4, 3)


def test_those_stay_whose_backwards_come_first() -> None:
    """Each comes back with the backward before its own, so that its way has the time of a backward and a forward."""
    assert waits_on_host(StageOrder(lookahead=0).program(0, 4, range(6)), 3) == {2: 1, 3: 2, 4: 3, 5: 4}
    assert waits_on_host(StageOrder(lookahead=1).program(0, 4, range(8)), 4) == {m: m - 2 for m in range(3, 8)}


@given(ORDERS, st.integers(1, 9), st.integers(1, 20), st.integers(LEAST_ON_DEVICE, 12), st.data())
def test_a_device_keeps_no_more_than_it_may(
    order: StageOrder, stages: int, microbatches: int, most: int, data: st.DataObject
) -> None:
    """Beside those of which only weight gradients are left. What leaves is there for a backward and a forward of
    others, and is back in time.
    """
    stage = data.draw(st.integers(0, stages - 1))
    program = order.program(stage, stages, range(microbatches))
    away = waits_on_host(program, most)
    late = sum(isinstance(one, BackwardInput) for one in program)
    held = most_on_device(program, most)
    assert held <= most_on_device(program, None) <= order.in_flight(stage, stages, microbatches)
    assert held <= most or late
    backwards = [one.microbatch for one in program if isinstance(one, Backward)]
    for m, before in away.items():
        since = program.index(Forward(m))
        assert any(one == before for one in backwards[: backwards.index(m)])
        assert since < next(
            i for i, one in enumerate(program) if isinstance(one, Backward) and one.microbatch == before
        )


def test_only_devices_with_memory_of_their_own_need_less() -> None:
    document = manifest(8, 1, 40)
    document["spec"]["topology"]["activationsOnDevice"] = 4
    here, there = parse_manifest(document), parse_manifest(_with_gpus(document))
    order = StageOrder.of(here.topology)
    assert (kept_on_device(here, order, 0, 8, 40), kept_on_device(there, order, 0, 8, 40)) == (15, 4)
    layers = profile(8, activations=1000).figures
    need = [device_bytes(layers, spec, taken_over=False) for spec in (here, there)]
    assert need[0] - need[1] == 11 * 1000


def test_a_step_takes_as_long_as_its_activations_are_on_their_way() -> None:
    document = _with_gpus(manifest(4, 1, 40))
    figures = profile(4, activations=int(5 * BUS)).figures  # five seconds each way
    ranges = tuple((s, s + 1) for s in range(4))
    usual = StepModel(figures, parse_manifest(document)).stages(ranges)
    document["spec"]["topology"]["activationsOnDevice"] = 3
    slower = StepModel(figures, parse_manifest(document)).stages(ranges)
    assert [f + b for f, b in zip(slower.forward[:2], slower.backward[:2], strict=True)] == [5.0, 5.0]
    assert slower.backward[2:] == usual.backward[2:], "they keep no more than that in any case"


def _with_gpus(document: dict) -> dict:
    worker = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    return {**document, "spec": {**document["spec"], "worker": worker, "topology": {**document["spec"]["topology"]}}}
