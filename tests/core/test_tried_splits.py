"""What steps took with splits that have been tried."""

from dataclasses import replace

from bamboo_core.planning.splits.tried_splits import MOST_TRIED, TriedSplit, are_alike, comparable, remembering

HALVES, THIRDS = ((0, 4), (4, 8)), ((0, 3), (3, 8))


def test_what_was_measured_counts_while_all_is_about_as_it_was() -> None:
    usual, slow = ((1.0, 1.0),), ((2.0, 1.0),)
    tried = (TriedSplit(HALVES, usual, 1.0), TriedSplit(THIRDS, usual, 1.2), TriedSplit(HALVES, slow, 2.0))
    assert comparable(tried, HALVES, ((1.1, 0.95),), 1.1) == {HALVES: 1.0, THIRDS: 1.2}
    assert comparable(tried, HALVES, ((1.9, 1.1),), 2.1) == {HALVES: 2.0}
    assert comparable(tried, HALVES, ((1.0, 2.0),), 1.0) == {}
    assert comparable(tried, THIRDS, slow, 2.0) == {}
    assert comparable(tried, HALVES, usual, 1.5) == {}, "something else has changed"
    assert not are_alike(usual, ((1.0, 1.0), (1.0, 1.0)))
    newer = remembering(tried, TriedSplit(HALVES, ((1.1, 1.0),), 1.5))
    assert (len(newer), comparable(newer, HALVES, usual, 1.5)[HALVES]) == (3, 1.5), "the newest counts"
    for i in range(2 * MOST_TRIED):
        newer = remembering(newer, replace(tried[0], paces=((2.0**i, 1.0),)))
    assert len(newer) == MOST_TRIED
