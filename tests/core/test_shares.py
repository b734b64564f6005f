"""The layers of a stage, shared out among the workers that write a checkpoint, or keep copies in memory."""

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.shares import kept_share, share
from replica_kit import planned


@given(st.integers(1, 7), st.integers(0, 5), st.integers(0, 30))
def test_each_layer_is_dealt_once_and_evenly(writers: int, first: int, count: int) -> None:
    names = [f"w{i}" for i in range(writers)]
    dealt = [share(names, name, (first, first + count)) for name in names]
    assert sorted(layer for layers in dealt for layer in layers) == list(range(first, first + count))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_layer_has_somebody_who_keeps_a_copy_of_it() -> None:
    plan = planned(stages=3, pipelines=2, replicas=1, zones="ab")
    kept = [layer for worker in plan.worker_ids() for layer in kept_share(plan, worker)]
    assert sorted(kept) == [0, 1, 2]
