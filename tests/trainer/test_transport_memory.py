"""The transport of the tests in one thread keeps the contract of the TCP one."""

import torch

from bamboo_trainer.transport.base import Arrived, LinkDown, Transport
from memory_transport import MemoryNetwork
from transport_kit import Inbox, make_frame


def test_frames_arrive_in_order_when_pumped() -> None:
    network = MemoryNetwork()
    a_in, b_in = Inbox(), Inbox()
    ends: list[Transport] = [network.attach("a", a_in), network.attach("b", b_in)]
    for end in ends:
        end.peers({"a": ("", 0), "b": ("", 0)})
    tensor = torch.ones(2)
    for index in range(3):
        ends[0].send("b", make_frame(tensor, microbatch=index, payload=(1, 2)))
    assert b_in.events == []
    assert network.pump() == 3
    frames = [event.frame for event in b_in.of(Arrived)]
    assert [frame.address.microbatch for frame in frames] == [0, 1, 2]
    assert frames[0].payload == [1, 2]  # as over TCP
    frames[0].tensors[0].zero_()
    assert tensor.sum() == 2


def test_what_the_dead_had_sent_arrives_before_their_links_break() -> None:
    network = MemoryNetwork()
    a_in, b_in = Inbox(), Inbox()
    a, b = network.attach("a", a_in), network.attach("b", b_in)
    a.peers({"b": ("", 0)})
    b.peers({"a": ("", 0)})
    b.send("a", make_frame())
    a.send("b", make_frame())
    b.close(0.0)
    b.send("a", make_frame())
    a.send("b", make_frame())
    assert network.pump() == 2
    assert [type(event) for event in a_in.events] == [Arrived, LinkDown]
    assert b_in.events == []


def test_the_memory_transport_fences_as_tcp_does() -> None:
    network = MemoryNetwork()
    b_in = Inbox()
    a, b = network.attach("a", Inbox()), network.attach("b", b_in)
    a.peers({"b": ("", 0)})
    a.send("b", make_frame(microbatch=1))
    assert network.pump() == 0
    b.peers({"a": ("", 0)})
    assert network.pump() == 1
    b.peers({})
    a.send("b", make_frame(microbatch=2))
    network.pump()
    b.peers({"a": ("", 0)})
    network.pump()
    assert [event.frame.address.microbatch for event in b_in.of(Arrived)] == [1]
