"""The in-memory transport keeps the contract of the TCP one."""

import pytest
import torch

from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp, Transport
from bamboo_trainer.transport.memory import MemoryNetwork
from transport_kit import Inbox, make_frame


def test_memory_delivers_in_order_when_pumped() -> None:
    network = MemoryNetwork()
    a_in, b_in = Inbox(), Inbox()
    ends: list[Transport] = [network.attach("a", a_in), network.attach("b", b_in)]
    for end in ends:
        end.peers({"a": ("", 0), "b": ("", 0)})
    tensor = torch.ones(2)
    for index in range(3):
        ends[0].send("b", make_frame(tensor, microbatch=index, meta=(1, 2)))
    assert b_in.events == []
    assert network.pump(1) == 1
    assert network.pump() == 2
    frames = [event.frame for event in b_in.of(Arrived)]
    assert [frame.address.microbatch for frame in frames] == [0, 1, 2]
    assert frames[0].meta == [1, 2]  # as over TCP
    frames[0].tensors[0].zero_()
    assert tensor.sum() == 2


def test_memory_synchronous_replies_do_not_nest() -> None:
    network = MemoryNetwork(synchronous=True)
    seen: list[int] = []

    def reply(event: Event) -> None:
        assert isinstance(event, Arrived)
        index = event.frame.address.microbatch
        if index < 5:
            a.send("a", make_frame(microbatch=index + 1))
        seen.append(index)

    a = network.attach("a", reply)
    a.peers({"a": ("", 0)})
    a.send("a", make_frame())
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("lose_sent", [False, True])
def test_memory_kill_and_return(lose_sent: bool) -> None:
    network = MemoryNetwork()
    a_in, b_in = Inbox(), Inbox()
    a, b = network.attach("a", a_in), network.attach("b", b_in)
    a.peers({"b": ("", 0)})
    b.peers({"a": ("", 0)})
    b.send("a", make_frame())
    a.send("b", make_frame())
    network.kill("b", lose_sent=lose_sent)
    b.send("a", make_frame())
    network.pump()
    assert [type(event) for event in a_in.events] == ([] if lose_sent else [Arrived]) + [LinkDown]
    assert b_in.events == []
    network.attach("b", b_in).peers({"a": ("", 0)})
    a.send("b", make_frame())
    network.pump()
    assert a_in.events[-1] == LinkUp("b")
    assert len(b_in.of(Arrived)) == 1


def test_memory_fences_like_tcp() -> None:
    network = MemoryNetwork(synchronous=True)
    b_in = Inbox()
    a, b = network.attach("a", Inbox()), network.attach("b", b_in)
    a.peers({"b": ("", 0)})
    a.send("b", make_frame(microbatch=1))
    assert b_in.events == []
    b.peers({"a": ("", 0)})
    assert len(b_in.events) == 1
    b.peers({})
    a.send("b", make_frame(microbatch=2))
    b.peers({"a": ("", 0)})
    assert len(b_in.events) == 1
