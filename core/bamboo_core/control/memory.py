"""What a worker says of itself in bytes: its memory, and what it sends to the others."""

from typing import Annotated

import msgspec

MOST = 1 << 60
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory that a worker computes in: a GPU's, or without GPUs the host's.

    peak: the most that it has taken so far. limit: the most that it may take.
    """

    peak: Bytes
    limit: Bytes


class Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes by kind: since the worker began, or of a step."""

    # activation, gradient: tensors at the stage's boundaries
    activation: Bytes = 0
    gradient: Bytes = 0
    # gradients of the stage that pipelines combine, or workers that share a lost pipeline's microbatches
    reduction: Bytes = 0
    kept: Bytes = 0  # sums of finished groups, which their keeper holds until the commit; and from it to a new owner
    tied: Bytes = 0  # gradients of tied parameters
    sync: Bytes = 0  # final gradients for replicas
    state: Bytes = 0  # whole states, for replicas that are filled
    layers: Bytes = 0  # layers for workers that begin with them after another split or from a checkpoint
    control: Bytes = 0  # everything else

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)

    def in_each(self, steps: int) -> "Traffic":
        """The mean of each kind for one of so many steps."""
        return Traffic(**{kind: size // max(1, steps) for kind, size in self.by_kind().items()})


class SentTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker has sent so far, and in how many steps."""

    sent: Traffic
    steps: Bytes
