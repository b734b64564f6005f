"""LinkStates: which breaks and recoveries of a link's lanes are reported as LinkDown and LinkUp."""

from bamboo_trainer.transport.links import LinkStates
from bamboo_trainer.transport.wire import Lane

ONE, TWO = list(Lane)[:2]


def test_of_lanes_that_break_together_only_the_first_is_news_and_each_that_heals_is() -> None:
    links = LinkStates()
    assert [links.broke("w1", ONE), links.broke("w1", TWO), links.broke("w1", ONE)] == [True, False, False]
    assert [links.stands("w1", TWO), links.stands("w1", ONE), links.stands("w1", ONE)] == [True, True, False]


def test_a_lane_that_breaks_after_a_recovery_is_news_again() -> None:
    links = LinkStates()
    assert links.broke("w1", ONE)
    assert links.stands("w1", ONE)
    assert links.broke("w1", TWO)


def test_peers_are_told_apart_and_forgotten() -> None:
    links = LinkStates()
    assert links.broke("w1", ONE)
    assert links.broke("w2", ONE)
    links.forget("w1")
    assert not links.stands("w1", ONE)
    assert links.stands("w2", ONE)
    assert links.broke("w1", ONE)
