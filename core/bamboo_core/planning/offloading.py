"""Which microbatches' activations wait in host memory, so that a device keeps those of a few only. Pure.

A microbatch's backward comes the later after its forward the earlier its stage is. Those stay on the device whose
backwards come next: while one backward runs, what the next ones need is there or on its way back, and what the newest
forward has made is on its way out. So each way has the time of a forward and a backward.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.schedule import Backward, BackwardInput, BackwardWeight, Forward, Instruction, StageOrder

BUS: Final = 25e9  # bytes a second each way, of a GPU among eight that share a host's memory over PCIe 5; assumed


def waits_on_host(program: Sequence[Instruction], on_device: int | None) -> dict[int, int]:
    """The microbatches whose activations leave the device after their forwards, and for each the one before whose
    backward they are brought back.

    on_device: the most microbatches' activations that are to be there; None: all.
    """
    if on_device is None or _most(program, {}, weights=False) <= on_device:
        return {}
    begun, backwards, found = dict[int, int](), list[int](), dict[int, int]()
    for one in program:
        match one:
            case Forward(m):
                begun[m] = len(backwards)
            case Backward(m):
                backwards.append(m)
                if len(backwards) - begun[m] >= on_device:
                    found[m] = backwards[1 - on_device]
            case _:
                pass
    return found


def most_on_device(program: Sequence[Instruction], on_device: int | None) -> int:
    """The most microbatches whose activations are on the device at one time, until their weight gradients are
    computed, too.
    """
    return _most(program, waits_on_host(program, on_device), weights=True)


def limit(spec: JobSpec) -> int | None:
    """The most microbatches' activations on a device of the job; None: all, as on workers without GPUs."""
    return spec.topology.activations_on_device if spec.worker.resources.gpus else None


def kept_on_device(spec: JobSpec, order: StageOrder, stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches whose activations a stage keeps on its device."""
    most = limit(spec)
    if most is None:
        return order.in_flight(stage, stages, microbatches)
    return most_on_device(order.program(stage, stages, range(microbatches)), most)


def _most(program: Sequence[Instruction], away: Mapping[int, int], *, weights: bool) -> int:
    """away: as `waits_on_host` gives it. weights: those of which only weight gradients are left count, too."""
    back = {before: m for m, before in away.items()}
    here, leaving, most = set[int](), set[int](), 0
    for one in program:
        match one:
            case Forward(m):
                here = (here - leaving) | {m}
                leaving = {m} & away.keys()
            case Backward(m) if m in back:
                here.add(back[m])
                leaving.discard(back[m])
            case _:
                pass
        most = max(most, len(here))
        match one:
            case Backward(m) if not (weights and isinstance(one, BackwardInput)):
                here.discard(m)
            case BackwardWeight(m):
                here.discard(m)
            case _:
                pass
    return most
