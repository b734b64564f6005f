"""How the layers of a stage are dealt to those who write them."""

from collections.abc import Sequence

from bamboo.planning.plan import WorkerId


def share(writers: Sequence[WorkerId], worker: WorkerId, layers: tuple[int, int]) -> list[int]:
    """The layers of a stage that one of its writers writes: they are dealt in turn. layers: half-open range."""
    first, end = layers
    return [layer for layer in range(first, end) if writers and writers[(layer - first) % len(writers)] == worker]
