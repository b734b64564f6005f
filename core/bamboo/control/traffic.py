"""What a worker sends to the others on the data plane, by kind."""

import msgspec

from bamboo.control.memory import Bytes


class Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes by kind: since the worker began, or of a step.

    activation, gradient: tensors at the stage's boundaries. reduction: gradients of the stage that pipelines combine,
    or workers that share a lost pipeline's microbatches. tied: gradients of tied parameters. sync: final gradients for
    replicas. parameters: values of the layers of a shard. state: whole states, for replicas that are filled. layers:
    layers for workers that begin with them after another split or from a checkpoint. control: everything else.
    """

    activation: Bytes = 0
    gradient: Bytes = 0
    reduction: Bytes = 0
    tied: Bytes = 0
    sync: Bytes = 0
    parameters: Bytes = 0
    state: Bytes = 0
    layers: Bytes = 0
    control: Bytes = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)

    def in_each(self, steps: int) -> "Traffic":
        """Of one of so many steps, in the mean."""
        return Traffic(**{kind: size // max(1, steps) for kind, size in self.by_kind().items()})


class SentTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker has sent so far, and in how many steps."""

    sent: Traffic
    steps: Bytes
