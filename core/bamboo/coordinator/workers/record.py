"""What a coordinator knows of a worker, while it is there and when it has ended."""

from dataclasses import dataclass, field

from bamboo.control.memory import Memory, SentTraffic
from bamboo.control.platform import Platform
from bamboo.planning.plan import Peer
from bamboo.planning.splits.stage_times import StageTimes


@dataclass(frozen=True, kw_only=True)  # no slots, for `changed`
class WorkerRecord:
    """A worker that joined and is not known to be lost."""

    peer: Peer
    seen: float
    platform: Platform = field(default_factory=Platform)
    doing: str = ""  # in its own words
    busy: float = 0.0  # seconds for which it had been inside one instruction when it was heard last
    memory: Memory | None = None  # as it said last
    times: tuple[StageTimes, ...] = ()  # as it said last
    headroom: float | None = None  # how many times as much memory as now there is for it, as it said with the times
    traffic: SentTraffic | None = None  # as it said last
    ready: bool = False  # its task is loaded
    epoch: int = 0  # of the newest plan that it knew when it joined
    origin: int = 0  # of the newest plan that it obeys
    cut_since: float | None = None  # the channel is closed since then
    notice_until: float | None = None
    notice_seconds: float = 0.0
    notice_final: bool = False
    replaced: bool = False  # the notice is ours: it is slow, and goes if another one takes its place
    free_since_step: int | None = None  # it has a notice and no part any more
    released: bool = False  # it was told to leave


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended, or was missed. disrupted: it was taken away, for no reason of its own."""

    how: str
    disrupted: bool
