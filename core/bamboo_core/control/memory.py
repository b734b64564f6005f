"""A worker's memory and traffic, in bytes."""

import msgspec

from bamboo_core.planning.profile import Bytes


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory use of a worker's GPU (with several: the one closest to its limit), or of its host if it has no GPU. peak:
    the most used so far. limit: the most that may be used.
    """

    peak: Bytes
    limit: Bytes


class Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that a worker sends to other workers, by kind: since it started, or per step."""

    # activation, gradient: tensors at the stage's boundaries; activation also counts spot checks
    activation: Bytes = 0
    gradient: Bytes = 0
    # gradients of a stage that are summed over pipelines, or over the workers that share a cell's microbatches
    reduction: Bytes = 0
    kept: Bytes = 0  # gradient sums of finished groups: to a worker that keeps them until the commit, or to a new owner
    tied: Bytes = 0  # gradients of tied parameters
    sync: Bytes = 0  # final gradients for replicas
    state: Bytes = 0  # layers' states, for replicas, and for workers that begin after a re-split or with a checkpoint
    control: Bytes = 0  # everything else

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)

    def in_each(self, steps: int) -> "Traffic":
        """Return the mean bytes of each kind over `steps` steps, rounded down."""
        return Traffic(**{kind: size // max(1, steps) for kind, size in self.by_kind().items()})


class SentTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The traffic that a worker has sent since it started, and the number of steps in that time."""

    sent: Traffic
    steps: Bytes
