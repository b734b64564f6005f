"""Where things go at the start: layers to stages, microbatches to pipelines, workers to cells."""

from collections.abc import Sequence
from itertools import pairwise

from bamboo.plan import Assignment, Layout, Peer, Plan, WorkerId
from bamboo.spec import RedundancyMode


def split_layers(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Contiguous layer ranges that minimise the costliest stage (dynamic programming, O(stages * layers^2)).

    Raises ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        raise ValueError(f"spec.topology.stages: expected at most the model's {layers} layers, got {stages}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[float("inf")] * (layers + 1) for _ in range(stages + 1)]
    cut = [[0] * (layers + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, layers + 1):
            for start in range(stage - 1, end):
                worst = max(best[stage - 1][start], total[end] - total[start])
                if worst < best[stage][end]:
                    best[stage][end], cut[stage][end] = worst, start
    bounds = [layers]
    for stage in range(stages, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return tuple(pairwise(reversed(bounds)))


def split_microbatches(microbatches: int, pipelines: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous, nearly equal shares of a step's microbatches."""
    bounds = [microbatches * d // pipelines for d in range(pipelines + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(bounds))


def ring(peers: Sequence[Peer], size: int) -> list[Peer]:
    """Choose and order `size` workers so that neighbours sit in different zones where that is possible.

    Greedy: always take from the zone with the most workers left that is not the previous one's.
    """
    left: dict[str, list[Peer]] = {}
    for peer in peers:
        left.setdefault(peer.zone, []).append(peer)
    chosen: list[Peer] = []
    while len(chosen) < size:
        zones = sorted((z for z in left if left[z]), key=lambda z: (-len(left[z]), z))
        others = [z for z in zones if not chosen or z != chosen[-1].zone]
        chosen.append(left[(others or zones)[0]].pop(0))
    return chosen


def close_ring(row: list[Peer], spare: Sequence[Peer]) -> list[Peer]:
    """The row with its last worker changed for another one, if that keeps more neighbours apart: its ends meet, too."""
    best, last = row, len(row) - 1
    for index in range(1, last):
        swapped = list(row)
        swapped[index], swapped[last] = swapped[last], swapped[index]
        best = min(best, swapped, key=_touching)
    for peer in spare:
        best = min(best, [*row[:last], peer], key=_touching)
    return best


def _touching(row: Sequence[Peer]) -> int:
    """How many neighbours in the ring share a zone."""
    return sum(a.zone == b.zone for a, b in zip(row, [*row[1:], row[0]], strict=True))


def shadow_of(row: Sequence[WorkerId], stage: int) -> WorkerId | None:
    """The worker that keeps a stage's replica: the nearest predecessor in the ring that is another worker."""
    for back in range(1, len(row)):
        candidate = row[(stage - back) % len(row)]
        if candidate != row[stage]:
            return candidate
    return None


def initial_plan(
    peers: Sequence[Peer],
    stages: tuple[tuple[int, int], ...],
    pipelines: int,
    microbatches: int,
    mode: RedundancyMode,
) -> Plan:
    """The first plan: needs stages x pipelines workers; those that are left stand by."""
    depth, redundant = len(stages), mode is not RedundancyMode.NONE
    order = ring(peers, depth * pipelines)
    rows: list[list[WorkerId]] = []
    for d in range(pipelines):
        used = {p.worker for p in order} | {w for row in rows for w in row}
        spare = [p for p in peers if p.worker not in used]
        rows.append([p.worker for p in close_ring(order[d * depth : (d + 1) * depth], spare)])
    cells = tuple(
        tuple(
            Assignment(owner=w, replicas=tuple(filter(None, [shadow_of(row, s)])) if redundant else ())
            for s, w in enumerate(row)
        )
        for row in rows
    )
    layout = Layout(generation=0, split=split_microbatches(microbatches, pipelines))
    return Plan(
        epoch=1,
        stages=stages,
        pipelines=cells,
        layouts=(layout,),
        workers=tuple(peers),
        mode=mode,
        reason="Started",
        message=f"{pipelines} pipeline(s) of {depth} stage(s), {len(peers) - depth * pipelines} on standby",
    )
