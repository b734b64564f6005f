"""What the contract of one-sided writes promises, of each implementation: whoever dies, freezes, wakes up or gives up
before, in the middle of or after a write, nothing lands in memory that a later connection reads.
"""

import base64
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

import one_sided_peer
from bamboo_trainer.transport.nixl.agent import Landing, MemoryKind, Nixl
from bamboo_trainer.transport.one_sided.contract import (
    RING_BYTES,
    SLOT_BYTES,
    SLOTS,
    OneSided,
    WriteSource,
    WriteTarget,
)
from bamboo_trainer.transport.one_sided.ring import HostRing
from one_sided_peer import DONE, LOST, UNDER_WAY, WRITTEN, go_on
from one_sided_ways import WAYS, way_of
from process_writes import PLACE, ProcessSource
from transport_kit import eventually

if sys.platform != "linux":
    pytest.skip("processes write to each other on Linux", allow_module_level=True)

SECONDS = 60.0  # that a test waits for something
BRIEF = 5.0  # far longer than closing takes on a busy machine, and shorter than any patience of a network
FIRST, LATE, NEW = 1, 2, 3  # what slots are full of

at_each_moment = pytest.mark.parametrize("moment", ["before", "in the middle of", "after"])
end_of = pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way(name: str, monkeypatch: pytest.MonkeyPatch) -> OneSided:
    return way_of(name, monkeypatch)


class Peer(subprocess.Popen[str]):
    """See one_sided_peer. takes_in: called while it is waited for."""

    def __init__(self, name: str) -> None:
        pipe = subprocess.PIPE
        super().__init__([sys.executable, one_sided_peer.__file__, name], stdin=pipe, stdout=pipe, text=True)
        self.takes_in: Callable[[], None] = lambda: None
        assert self._heard() == "here"

    def ask(self, word: str, argument: object = "") -> str:
        assert self.stdin is not None
        self.stdin.write(f"{word} {argument}\n")
        self.stdin.flush()
        return self._heard()

    def reach(self, target: WriteTarget) -> None:
        """Have it make a source that writes there."""
        self.takes_in = target.progress
        self.ask("source", base64.b64encode(target.landing()).decode())

    def write(self, value: int, moment: str) -> None:
        """As far as that moment: a whole slot takes several looks."""
        if moment != "before":
            self.ask("begin", value)
            self.ask("once")
        if moment == "after":
            assert self.ask("finish") == WRITTEN

    def _heard(self) -> str:
        assert self.stdout is not None
        deadline = time.monotonic() + SECONDS
        while not select.select([self.stdout], [], [], 1e-3)[0]:
            assert time.monotonic() < deadline
            self.takes_in()
        return self.stdout.readline().strip()


@pytest.fixture
def peer(name: str, way: OneSided) -> Iterator[Peer]:
    with Peer(name) as process:
        try:
            yield process
        finally:
            process.kill()


def fill(end: WriteSource | WriteTarget, value: int) -> None:
    for number in range(SLOTS):
        end.slot(number)[:] = value


def is_full_of(target: WriteTarget, value: int, slots: range = range(SLOTS)) -> bool:
    return all(bool((target.slot(number) == value).all()) for number in slots)


def outcome(source: WriteSource, slot: int, target: WriteTarget | None = None) -> str:
    """Of a write of a whole slot."""
    try:
        return ended(source, source.write(slot, SLOT_BYTES), target)
    except ConnectionError:
        return LOST


def ended(source: WriteSource, transfer: int, target: WriteTarget | None = None) -> str:
    deadline = time.monotonic() + SECONDS
    try:
        while go_on(source, transfer) == UNDER_WAY:
            assert time.monotonic() < deadline
            if target is not None:
                target.progress()
    except ConnectionError:
        return LOST
    return WRITTEN


@contextmanager
def connection(way: OneSided) -> Iterator[tuple[WriteSource, WriteTarget]]:
    target = way.target("here")
    source = way.source("here", target.landing())
    try:
        yield source, target
    finally:
        closed_briefly(source)
        closed_briefly(target)


def closed_briefly(end: WriteSource | WriteTarget) -> None:
    began = time.monotonic()
    end.close()
    end.close()
    assert time.monotonic() - began < BRIEF


def a_new_connection_works(way: OneSided) -> None:
    with connection(way) as (source, target):
        fill(target, FIRST)
        fill(source, NEW)
        for number in range(SLOTS):
            assert outcome(source, number, target) == WRITTEN
        assert is_full_of(target, NEW)


def test_what_is_written_is_there_and_nothing_beside_it(way: OneSided) -> None:
    with connection(way) as (source, target):
        fill(target, FIRST)
        source.slot(2)[:] = NEW
        assert ended(source, source.write(2, SLOT_BYTES - 7), target) == WRITTEN
        assert (target.slot(2)[:-7] == NEW).all()
        assert (target.slot(2)[-7:] == FIRST).all()
        assert is_full_of(target, FIRST, range(2))


@at_each_moment
@end_of
def test_a_source_lost_leaves_the_target_to_end_and_a_new_one_to_begin(
    way: OneSided, peer: Peer, moment: str, end: str
) -> None:
    target = way.target("here")
    fill(target, FIRST)
    peer.reach(target)
    peer.write(LATE, moment)
    peer.send_signal(signal.Signals[end])
    assert is_full_of(target, FIRST, range(1, SLOTS))
    assert moment != "after" or is_full_of(target, LATE, range(1))
    closed_briefly(target)
    a_new_connection_works(way)


@at_each_moment
@end_of
def test_a_target_lost_leaves_the_source_to_end_and_a_new_one_to_begin(
    way: OneSided, peer: Peer, moment: str, end: str
) -> None:
    source = way.source("here", base64.b64decode(peer.ask("target")))
    fill(source, FIRST)
    if moment == "after":
        assert outcome(source, 0) == WRITTEN
    flying = [source.write(number, SLOT_BYTES) for number in range(SLOTS) if moment == "in the middle of"]
    peer.send_signal(signal.Signals[end])
    if end == "SIGKILL":
        peer.wait()
        found = {ended(source, transfer) for transfer in flying} or {outcome(source, 1)}
        assert LOST in found
    closed_briefly(source)
    a_new_connection_works(way)


@at_each_moment
def test_a_late_write_of_an_earlier_connection_reaches_nothing_of_a_newer_one(
    way: OneSided, peer: Peer, moment: str
) -> None:
    """Its source is frozen, given up, and awake again when the next connection has begun."""
    old = way.target("here")
    peer.reach(old)
    peer.write(LATE, moment)
    peer.send_signal(signal.SIGSTOP)
    closed_briefly(old)
    with connection(way) as (source, target):
        fill(target, FIRST)
        peer.takes_in = target.progress
        peer.send_signal(signal.SIGCONT)
        if moment == "in the middle of":
            peer.ask("finish")
        if peer.ask("begin", LATE) == DONE:
            peer.ask("finish")
        assert is_full_of(target, FIRST)
        source.slot(1)[:] = NEW
        assert outcome(source, 1, target) == WRITTEN
        assert is_full_of(target, NEW, range(1, 2))


def test_a_source_that_gives_up_leaves_nothing_that_writes_into_a_newer_connection(way: OneSided) -> None:
    """Neither end is lost: both close in the middle of writes."""
    with connection(way) as (source, target):
        fill(target, FIRST)
        fill(source, LATE)
        for number in range(2):
            go_on(source, source.write(number, SLOT_BYTES))
        closed_briefly(source)
        target.progress()
        assert is_full_of(target, FIRST, range(2, SLOTS))
    a_new_connection_works(way)


@pytest.mark.parametrize("landing", [b"nonsense", msgspec.msgpack.encode(Landing(b"nonsense", 4096, MemoryKind.HOST))])
def test_what_is_no_landing_is_refused(way: OneSided, landing: bytes) -> None:
    with pytest.raises(ConnectionError):
        way.source("here", landing)


@pytest.mark.parametrize("name", ["NIXL over TCP"], indirect=True)
def test_what_nixl_still_writes_is_kept_until_it_has_ended(way: Nixl, peer: Peer) -> None:
    source = way.source("here", base64.b64decode(peer.ask("target")))
    assert outcome(source, 0) == WRITTEN
    peer.send_signal(signal.SIGSTOP)
    for number in range(SLOTS):
        source.write(number, SLOT_BYTES)
    closed_briefly(source)
    assert way.unfinished.look() == 1
    peer.send_signal(signal.SIGCONT)
    assert eventually(lambda: way.unfinished.look() == 0)


def test_no_ring_has_addresses_of_an_earlier_one() -> None:
    seen = set[int]()
    for _ in range(20):
        ring = HostRing()
        addresses = set(range(ring.address, ring.address + RING_BYTES, SLOT_BYTES))
        assert not addresses & seen
        seen |= addresses
        ring.withdraw()


def test_a_withdrawn_ring_gives_its_memory_back_and_takes_no_write() -> None:
    before, ring = resident(), HostRing()
    for number in range(SLOTS):
        ring.slot(number)[:] = FIRST
    assert resident() - before > RING_BYTES // 2
    ring.withdraw()
    assert resident() - before < RING_BYTES // 2
    source = ProcessSource(PLACE.pack(os.getpid(), ring.address), torch.device("cpu"))
    assert outcome(source, 0) == LOST
    source.close()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
