"""What a worker says of itself in bytes: what its memory is used for, and what it sends to the others."""

from typing import Annotated

import msgspec

MOST = 1 << 60
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class BytesByKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field is a kind, of type Bytes."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)


class Memory(BytesByKind, frozen=True):
    """Bytes by kind. What belongs to two kinds counts once, with the first of them, so that the total is real."""

    # parameters, optimizer: of the stages that the worker owns, frozen values and buffers included
    parameters: Bytes = 0
    optimizer: Bytes = 0
    replica: Bytes = 0  # the same of the stages that it keeps for others
    gradients: Bytes = 0  # sums so far, and final ones not yet applied
    log: Bytes = 0  # what may have to be sent again
    activations: Bytes = 0  # what the backwards of the microbatches in flight need
    redundant: Bytes = 0  # what has been computed in advance for others
    received: Bytes = 0  # frames that wait for their turn
    copies: Bytes = 0  # of layers, in host memory, for checkpoints and while layers are split anew

    def highest(self, other: "Memory") -> "Memory":
        """The larger number of each kind."""
        mine, others = self.by_kind(), other.by_kind()
        return Memory(**{kind: max(mine[kind], others[kind]) for kind in mine})


class Traffic(BytesByKind, frozen=True):
    """Bytes by kind: since the worker began, or of a step."""

    # activation, gradient: tensors at the stage's boundaries
    activation: Bytes = 0
    gradient: Bytes = 0
    # gradients of the stage that pipelines combine, or workers that share a lost pipeline's microbatches
    reduction: Bytes = 0
    tied: Bytes = 0  # gradients of tied parameters
    sync: Bytes = 0  # final gradients for replicas
    state: Bytes = 0  # whole states, for replicas that are filled
    layers: Bytes = 0  # layers for workers that begin with them after another split or from a checkpoint
    control: Bytes = 0  # everything else

    def in_each(self, steps: int) -> "Traffic":
        """The mean of each kind for one of so many steps."""
        return Traffic(**{kind: size // max(1, steps) for kind, size in self.by_kind().items()})


class SentTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker has sent so far, and in how many steps."""

    sent: Traffic
    steps: Bytes
