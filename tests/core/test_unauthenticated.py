"""Which connection has to go for another while nobody has proved who they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.serving.unauthenticated import UnauthenticatedConnections, network_of


def test_whoever_has_most_idle_connections_loses_the_oldest() -> None:
    callers = UnauthenticatedConnections[str](4)
    for key, host in (("a", "10.0.0.1"), ("b1", "10.0.0.2"), ("b2", "10.0.0.2"), ("c", "10.0.0.3")):
        assert callers.admit(key, host) is None
    assert callers.admit("c2", "10.0.0.3") == "b1"
    assert callers.admit("d", "10.0.0.4") == "c"
    assert callers.admit("e", "10.0.0.5") == "a", "all have one: the oldest"
    assert len(callers) == 4


def test_who_is_being_served_stays_and_a_newcomer_is_sent_away_if_all_are() -> None:
    callers = UnauthenticatedConnections[str](2)
    for key in ("a", "b"):
        callers.admit(key, "10.0.0.1")
        callers.mark(key, busy=True)
    assert callers.admit("c", "10.0.0.2") == "c"
    assert "c" not in callers
    callers.mark("b", busy=False)
    assert callers.admit("c", "10.0.0.2") == "b"
    callers.remove("a")
    assert callers.admit("d", "10.0.0.1") is None


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_that_one_host_may_have_count_together(host: str, place: str) -> None:
    assert network_of(host) == place


@given(st.lists(st.tuples(st.sampled_from(["come", "busy", "idle", "leave"]), st.integers(0, 9), st.integers(0, 2))))
def test_the_room_is_never_exceeded_and_the_crowd_pays(acts: list[tuple[str, int, int]]) -> None:
    callers, there = UnauthenticatedConnections[int](3), dict[int, tuple[int, bool]]()
    for act, key, host in acts:
        match act:
            case "come" if key not in there:
                idle = [h for h, busy in there.values() if not busy]
                leaving = callers.admit(key, str(host))
                if leaving is not None and leaving != key:
                    gone, busy = there.pop(leaving)
                    assert not busy
                    assert idle.count(gone) == max(idle.count(h) for h in idle)
                if leaving != key:
                    there[key] = (host, False)
            case "busy" | "idle" if key in there:
                callers.mark(key, busy=act == "busy")
                there[key] = (there[key][0], act == "busy")
            case "leave":
                callers.remove(key)
                there.pop(key, None)
        assert len(callers) == len(there) <= 3
        assert all(key in callers for key in there)
