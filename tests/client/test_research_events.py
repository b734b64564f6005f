"""The draws of an hour, as in the published simulator."""

from bamboo.simulation.research.research_events import ResearchHours


def test_the_draws_of_an_hour() -> None:
    """They follow the seed, stay within the hour and the capacity, and take only who is there, after it came."""
    for seed in range(20):
        hours = ResearchHours(seed, 0.5, 48)
        there = hours.first()
        for begin in range(0, 5 * 3_600_000, 3_600_000):
            moments = hours.hour(begin, there)
            assert moments == sorted(moments, key=lambda moment: (moment[0], not moment[1]))
            for at, added, node in moments:
                assert begin <= at < begin + 3_600_000
                assert (node in there) is not added
                there = [*there, node] if added else [one for one in there if one != node]
                assert len(there) <= 48
    assert ResearchHours(1, 0.5, 48).first() == ResearchHours(1, 0.5, 48).first()
