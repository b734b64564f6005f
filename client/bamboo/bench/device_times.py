"""What devices did in a step, from what torch.profiler has recorded of all workers there. Pure.

A device may run kernels and copies at once, on several streams and for several workers: time in which two of a kind run
counts once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bamboo.bench.report import DeviceTime, ThreadTime

Interval = tuple[int, int]  # begin and end, in nanoseconds


class ActivityKind(StrEnum):
    """COMPUTE: kernels, and whatever stays within a device's own memory."""

    COMPUTE = "compute"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    BETWEEN_DEVICES = "between devices"


COPIES = frozenset(ActivityKind) - {ActivityKind.COMPUTE}


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel, or a copy, on any stream of a device."""

    device: str
    kind: ActivityKind
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of a worker, from its first instruction to the next step's first one.

    waits: in which the worker's thread had nothing to do. driver: in which it waited for a device.
    """

    worker: str
    step: Interval
    activities: tuple[Activity, ...]
    waits: tuple[Interval, ...] = ()
    driver: tuple[Interval, ...] = ()


def device_times(recordings: Sequence[RecordedStep]) -> tuple[DeviceTime, ...]:
    """The shares of each device's time, by name. Of a device that several workers share the time is that from the first
    one's beginning to the last one's end.
    """
    recordings = _undisturbed(recordings)
    activities: dict[str, list[Activity]] = defaultdict(list)
    steps: dict[str, list[Interval]] = defaultdict(list)
    for one in recordings:
        for activity in one.activities:
            activities[activity.device].append(activity)
        for device in {activity.device for activity in one.activities}:
            steps[device].append(one.step)
    return tuple(_device_time(name, activities[name], _hull(steps[name])) for name in sorted(activities))


def _device_time(name: str, activities: Iterable[Activity], step: Interval) -> DeviceTime:
    by_kind: dict[ActivityKind, list[Interval]] = {kind: [] for kind in ActivityKind}
    for one in activities:
        by_kind[one.kind].append((one.begin, one.end))
    taken = {kind: covered(intervals, step) for kind, intervals in by_kind.items()}
    busy = covered([one for intervals in by_kind.values() for one in intervals], step)
    whole = step[1] - step[0]
    computing = taken[ActivityKind.COMPUTE]
    return DeviceTime(
        device=name,
        seconds=whole / 1e9,
        computing=computing / whole,
        to_device=taken[ActivityKind.TO_DEVICE] / whole,
        to_host=taken[ActivityKind.TO_HOST] / whole,
        between=taken[ActivityKind.BETWEEN_DEVICES] / whole,
        copying_alone=(busy - computing) / whole,
        idle=(whole - busy) / whole,
    )


def thread_times(recordings: Sequence[RecordedStep]) -> tuple[ThreadTime, ...]:
    """What the threads that give devices their work waited for, by worker."""
    found = []
    for one in sorted(_undisturbed(recordings), key=lambda one: one.worker):
        whole = one.step[1] - one.step[0]
        waits, driver = (covered(intervals, one.step) / whole for intervals in (one.waits, one.driver))
        found.append(ThreadTime(worker=one.worker, seconds=whole / 1e9, waits=waits, driver=driver))
    return tuple(found)


def _undisturbed(recordings: Sequence[RecordedStep]) -> list[RecordedStep]:
    """The recordings, of each as much as the shortest one has: that of the worker whose next step began first. To end
    it has held up that step, and so the other workers' ends.
    """
    shortest = min((end - begin for begin, end in (one.step for one in recordings)), default=0)
    return [replace(one, step=(one.step[0], one.step[0] + shortest)) for one in recordings]


def covered(intervals: Iterable[Interval], within: Interval) -> int:
    """The nanoseconds of an interval in which at least one of these lasts."""
    total, until = 0, within[0]
    for begin, end in sorted(intervals):
        begin, end = max(begin, until), min(end, within[1])
        if end > begin:
            total, until = total + end - begin, end
    return total


def _hull(intervals: Sequence[Interval]) -> Interval:
    return min(begin for begin, _ in intervals), max(end for _, end in intervals)


# what torch.profiler writes


@dataclass(frozen=True, slots=True)
class ProfiledEvent:
    """What counts of a span in a file of torch.profiler. process: of a device's work its number. begin, end:
    nanoseconds of a clock that all processes of the machine share.
    """

    category: str
    name: str
    process: int | str
    begin: int
    end: int


_COPY_KINDS: Mapping[str, ActivityKind] = {
    "HtoD": ActivityKind.TO_DEVICE,
    "DtoH": ActivityKind.TO_HOST,
    "PtoP": ActivityKind.BETWEEN_DEVICES,
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_DRIVER = ("cuda_runtime", "cuda_driver")
_STEP, _WAIT = "ProfilerStep#", "Wait for "


def recording_of(worker: str, events: Sequence[ProfiledEvent], *, gpu: bool) -> RecordedStep | None:
    """The step that a file is of; None if there is none in it. gpu: else a worker's processor is its device, and what
    its operations take is computing.
    """
    notes = [one for one in events if one.category == "user_annotation"]
    spans = [(one.begin, one.end) for one in notes if one.name.startswith(_STEP) and one.end > one.begin]
    if not spans:
        return None
    if gpu:
        activities = [_on_device(one) for one in events if one.category in _ON_DEVICE]
    else:
        name = f"{worker}'s processor"
        operations = (one for one in events if one.category == "cpu_op")
        activities = [Activity(name, ActivityKind.COMPUTE, one.begin, one.end) for one in operations]
    waits = [(one.begin, one.end) for one in notes if one.name.startswith(_WAIT)]
    driver = [(one.begin, one.end) for one in events if one.category in _DRIVER and "Synchronize" in one.name]
    return RecordedStep(
        worker=worker,
        step=_hull(spans),
        activities=tuple(activities),
        waits=tuple(waits),
        driver=tuple(driver),
    )


def _on_device(event: ProfiledEvent) -> Activity:
    """A copy is named `Memcpy HtoD (Pinned -> Device)`; one from device to device stays within one, from peer to peer
    it does not.
    """
    kind = ActivityKind.COMPUTE
    if event.category == "gpu_memcpy":
        kind = next((kind for word, kind in _COPY_KINDS.items() if word in event.name), kind)
    return Activity(f"cuda:{event.process}", kind, event.begin, event.end)
