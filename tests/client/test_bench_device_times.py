"""What devices did in a step, by values: kernels and copies that run at once count once."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bamboo.bench.device_times import (
    Activity,
    ActivityKind,
    Interval,
    ProfiledEvent,
    RecordedStep,
    covered,
    device_times,
    recording_of,
    thread_times,
)
from bamboo.bench.report import DeviceTime, ThreadTime

COMPUTE, TO_DEVICE, TO_HOST, BETWEEN = ActivityKind
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda two: (min(two), max(two))))


def recording(*activities: tuple[str, ActivityKind, int, int], step: Interval = (0, 1000)) -> RecordedStep:
    return RecordedStep(worker="w0", step=step, activities=tuple(Activity(*one) for one in activities))


def only(*recordings: RecordedStep) -> DeviceTime:
    (found,) = device_times(recordings)
    return found


@given(INTERVALS, st.integers(0, 60), st.integers(0, 60))
def test_time_is_covered_once_however_many_intervals_lie_there(intervals: list[Interval], one: int, other: int) -> None:
    begin, end = min(one, other), max(one, other)
    counted = {at for a, b in intervals for at in range(a, b) if begin <= at < end}
    assert covered(intervals, (begin, end)) == len(counted)


def test_kernels_of_two_streams_at_once_and_a_copy_behind_them_are_not_added_up() -> None:
    found = only(
        recording(
            ("cuda:0", COMPUTE, 0, 400),
            ("cuda:0", COMPUTE, 200, 500),
            ("cuda:0", TO_HOST, 300, 600),
            ("cuda:0", TO_DEVICE, 900, 950),
            ("cuda:0", BETWEEN, 925, 975),
        )
    )
    assert (found.computing, found.to_host, found.to_device, found.between) == (0.5, 0.3, 0.05, 0.05)
    assert math.isclose(found.copying_alone, 0.175)
    assert math.isclose(found.idle, 0.325)
    assert math.isclose(found.computing + found.copying_alone + found.idle, 1.0)


def test_each_device_has_its_own_time_and_workers_that_share_one_fill_it_together() -> None:
    first = recording(("cuda:0", COMPUTE, 0, 500), ("cuda:1", COMPUTE, 0, 100))
    second = recording(("cuda:0", COMPUTE, 400, 900), step=(200, 1200))
    shared, own = device_times([second, first])
    assert (shared.device, shared.seconds, shared.computing, shared.idle) == ("cuda:0", 1.2e-6, 0.75, 0.25)
    assert (own.device, own.seconds, own.computing, own.idle) == ("cuda:1", 1e-6, 0.1, 0.9)


def test_what_lies_before_or_behind_the_step_does_not_count() -> None:
    found = only(recording(("cuda:0", COMPUTE, -50, 100), ("cuda:0", TO_HOST, 950, 1100)))
    assert (found.computing, found.to_host, found.idle) == (0.1, 0.05, 0.85)


def test_of_each_worker_as_much_counts_as_of_the_first_one_to_end() -> None:
    """Its next step waits while it ends its recording, and with it those of the others."""
    first = recording(("cuda:0", COMPUTE, 0, 500), step=(0, 1000))
    second = recording(("cuda:1", COMPUTE, 300, 800), ("cuda:1", TO_HOST, 1400, 1600), step=(300, 3300))
    assert [(one.seconds, one.computing, one.idle) for one in device_times([first, second])] == 2 * [(1e-6, 0.5, 0.5)]


def event(category: str, name: str, begin: int, end: int, process: int | str = 7) -> ProfiledEvent:
    return ProfiledEvent(category, name, process, begin, end)


def test_spans_of_the_profiler_are_told_apart_as_its_files_name_them() -> None:
    """Names and categories are those of kineto."""
    step = event("user_annotation", "ProfilerStep#6", 100, 1100)
    events = [
        step,
        event("gpu_user_annotation", "ProfilerStep#6", 50, 1050, 3),
        event("user_annotation", "Wait for a frame", 200, 300),
        event("user_annotation", "Forward for stage 0 of pipeline 0, step 6, microbatch 0", 300, 400),
        event("cuda_runtime", "cudaLaunchKernel", 300, 310),
        event("cuda_runtime", "cudaStreamSynchronize", 500, 700),
        event("cuda_driver", "cuEventSynchronize", 650, 750),
        event("cpu_op", "aten::mm", 300, 350),
        event("kernel", "ampere_sgemm_128x64_nn", 310, 500, 3),
        event("gpu_memset", "Memset (Device)", 500, 510, 3),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 510, 520, 3),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 600, 650, 3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 700, 800, 3),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1080, 1120, 3),
    ]
    found = recording_of("w1", events, gpu=True)
    assert found is not None
    assert found.step == (100, 1100)
    assert found.activities == (
        Activity("cuda:3", COMPUTE, 310, 500),
        Activity("cuda:3", COMPUTE, 500, 510),
        Activity("cuda:3", COMPUTE, 510, 520),
        Activity("cuda:3", TO_DEVICE, 600, 650),
        Activity("cuda:3", TO_HOST, 700, 800),
        Activity("cuda:3", BETWEEN, 1080, 1120),
    )
    assert thread_times([found]) == (ThreadTime(worker="w1", seconds=1e-6, waits=0.1, driver=0.25),)
    assert recording_of("w1", events[1:], gpu=True) is None


def test_without_gpus_a_worker_computes_while_its_operations_run() -> None:
    step = event("user_annotation", "ProfilerStep#6", 0, 1000)
    operations = [event("cpu_op", "aten::linear", 100, 300), event("cpu_op", "aten::addmm", 150, 250)]
    found = recording_of("w0", [step, *operations], gpu=False)
    assert found is not None
    (time,) = device_times([found])
    assert (time.device, time.computing, time.idle) == ("w0's processor", 0.2, 0.8)
