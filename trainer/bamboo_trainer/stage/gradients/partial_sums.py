"""What one worker has computed for a portion of another's cell: packed for its owner, and added to the owner's work."""

from bamboo_trainer.frames.payloads import Contributed, PartialSum
from bamboo_trainer.stage.contributions import packed, unpacked
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts


def packed_work(work: Work) -> tuple[PartialSum, Parts]:
    """What a frame says of finished work, and its tensors: the sums of its groups, then what was contributed."""
    work.read(work.figures())
    contributed, data = packed(work.contributions)
    payload = PartialSum(
        losses=dict(work.losses),
        weights=dict(work.weights),
        metrics=dict(work.metrics),
        added=dict(work.added_values),
        contributed=contributed.microbatches,
    )
    return payload, (*(total for _, total in work.gradients.nodes()), *data)


def add_to(work: Work, microbatches: tuple[int, int], payload: PartialSum, tensors: Parts) -> None:
    """What `packed_work` has made of these microbatches, half-open, is part of this work."""
    count = work.gradients.receive(microbatches, tensors)
    work.losses |= payload.losses
    work.weights |= payload.weights
    work.metrics |= payload.metrics
    work.added_values |= payload.added
    work.contributions |= unpacked(Contributed(microbatches=payload.contributed), tensors[count:])
