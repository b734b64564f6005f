"""The record of a simulated run: its events, figures, and series over time. Pure."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from bamboo.simulation.job.zone_traffic import GB, ZONE_TRAFFIC_PRICE, traffic_usd
from bamboo_core.job.budget_reach import HOUR

BINS = 200  # in a series


Span = tuple[float, float, float]  # from, until, amount


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """The figures of one run. Rates are means over the time since the job was submitted."""

    preemptions: int  # workers that were taken away, with or without notice
    takeovers: int  # cells that moved in the middle of a step, or with notice
    restores: int  # returns to a checkpoint
    fatal: int  # losses of a stage with all its copies
    repeated: int  # steps that were done again
    pause: float  # seconds; the mean extension of a step in which an owner was lost
    nodes: float  # mean number of paid nodes
    throughput: float  # samples per second, without repeated ones
    # usd_per_hour, usd: of nodes and traffic; nan if a price is unknown
    usd_per_hour: float
    usd: float
    zone_gb_per_hour: float  # traffic between zones
    zone_usd_per_hour: float  # the part of usd_per_hour for traffic between zones
    value: float  # samples per second for each USD per hour
    # the time of the steps on the whole grid without disturbances, over the time since training began
    goodput: float
    # trained, redone: hours of new steps, without the pauses counted in `pause`, and hours of repeated steps
    trained: float
    redone: float
    waited: float  # hours without training: before it began, during cuts, and after losses without a takeover
    begun: float  # hours until training began
    hours: float  # until the job ended, or until the time was up
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The figures of a run over time, in bins of equal length.

    Fields in SO_FAR are cumulative up to the end of the bin; all others but `hours` are means over the bin.
    """

    hours: tuple[float, ...]  # at the end of each bin
    nodes: tuple[float, ...]
    throughput: tuple[float, ...]
    usd_per_hour: tuple[float, ...]
    value: tuple[float, ...]
    goodput: tuple[float, ...]
    preemptions: tuple[int, ...]
    takeovers: tuple[int, ...]
    restores: tuple[int, ...]
    pauses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The outcome of a simulated run, with its figures and their course over time."""

    figures: JobFigures
    series: Series
    outcome: str  # how the job ended, or "cut": the time was up
    message: str
    steps: tuple[Span, ...] = ()  # (from, until, number of new steps), in seconds since the job was submitted


SO_FAR = ("preemptions", "takeovers", "restores", "pauses")


@dataclass(slots=True)
class JobRecord:
    """The record of a run's steps, costs and events. Times are in seconds since the job was submitted."""

    samples: int  # per step
    usual: float = 0.0  # seconds of an undisturbed step on the whole grid
    paid_usd: float = 0.0  # for nodes, so far
    begun: float | None = None
    steps: list[Span] = field(default_factory=list)  # (from, until, number of new steps)
    # nodes, usd: spans with node-seconds, and with USD for nodes
    nodes: list[Span] = field(default_factory=list)
    usd: list[Span] = field(default_factory=list)
    priced: bool = True
    zone_price: float = ZONE_TRAFFIC_PRICE  # USD per GB and direction
    crossed: list[Span] = field(default_factory=list)  # bytes between zones
    moments: dict[str, list[float]] = field(default_factory=dict)  # times by kind, such as preemptions
    pauses: list[tuple[float, float]] = field(default_factory=list)  # (time, seconds)
    stopped: list[Span] = field(default_factory=list)
    redone: float = 0.0  # seconds of repeated steps
    repeated: int = 0
    fatal: int = 0
    _since: float = 0.0

    def note(self, what: str, at: float) -> None:
        self.moments.setdefault(what, []).append(at)

    def paid(self, now: float, nodes: int, usd_per_hour: float | None) -> None:
        """Record the nodes paid for since the last call. usd_per_hour: their price in all; None makes costs unknown."""
        if now > self._since:
            self.nodes.append((self._since, now, nodes * (now - self._since)))
            if usd_per_hour is None:
                self.priced = False
            else:
                self.usd.append((self._since, now, usd_per_hour * (now - self._since) / HOUR))
                self.paid_usd += self.usd[-1][2]
            self._since = now

    def sent(self, since: float, until: float, size: float) -> None:
        """Record bytes that cross zones at an even rate from `since` until `until`."""
        if size:
            self.crossed.append((since, until, size))

    def figures(self, end: float) -> JobFigures:
        trained = sum(count for _, _, count in self.steps)
        crossed = sum(size for _, _, size in self.crossed)
        across = traffic_usd(crossed, self.zone_price)
        usd = sum(paid for _, _, paid in self.usd) + across if self.priced else float("nan")
        hours, seconds = end / HOUR, max(end, 1e-9)
        rate, throughput = usd / seconds * HOUR, trained * self.samples / seconds
        since = end - (self.begun if self.begun is not None else end)
        counts = Counter({what: len(times) for what, times in self.moments.items()})
        return JobFigures(
            preemptions=counts["preemptions"],
            takeovers=counts["takeovers"],
            restores=counts["restores"],
            fatal=self.fatal,
            repeated=self.repeated,
            pause=sum(s for _, s in self.pauses) / len(self.pauses) if self.pauses else 0.0,
            nodes=sum(n for _, _, n in self.nodes) / seconds,
            throughput=throughput,
            usd_per_hour=rate,
            usd=usd,
            zone_gb_per_hour=crossed / GB / seconds * HOUR,
            zone_usd_per_hour=across / seconds * HOUR,
            value=throughput / rate if rate else float("nan"),
            goodput=trained * self.usual / since if since > 0 else 0.0,
            trained=self._trained / HOUR,
            redone=self.redone / HOUR,
            waited=sum(s for _, _, s in self.stopped) / HOUR,
            begun=(self.begun if self.begun is not None else end) / HOUR,
            hours=hours,
            steps=round(trained),
        )

    @property
    def _trained(self) -> float:
        """The seconds of training, without repeated steps and pauses."""
        whole = sum(until - since for since, until, _ in self.steps) - self.redone
        return max(0.0, whole - sum(seconds for _, seconds in self.pauses))

    def stepped(self, since: float, until: float, steps: int, new: int) -> None:
        """Record `steps` steps from `since` to `until`. new: how many of them ran for the first time (0 if < 0)."""
        self.steps.append((since, until, max(0, new)))
        self.redone += (until - since) * (steps - max(0, new)) / steps

    def series(self, end: float) -> Series:
        width = max(end, 1e-9) / BINS
        edges = [width * (i + 1) for i in range(BINS)]
        throughput = [self.samples * n / width for n in _binned(self.steps, width)]
        billed = [*self.usd, *((a, b, traffic_usd(size, self.zone_price)) for a, b, size in self.crossed)]
        usd = [paid / width * HOUR if self.priced else float("nan") for paid in _binned(billed, width)]
        return Series(
            hours=tuple(edge / HOUR for edge in edges),
            nodes=tuple(n / width for n in _binned(self.nodes, width)),
            throughput=tuple(throughput),
            usd_per_hour=tuple(usd),
            value=tuple(t / u if u else float("nan") for t, u in zip(throughput, usd, strict=True)),
            goodput=tuple(t / self.samples * self.usual for t in throughput),
            **{name: _counted(self.moments.get(name, []), edges) for name in ("preemptions", "takeovers", "restores")},
            pauses=tuple(accumulate(_binned([(at, at, seconds) for at, seconds in self.pauses], width))),
        )


def mean_over_time(name: str, runs: Sequence[Series]) -> tuple[list[float], list[float]]:
    """Return the longest run's bin ends in hours, and for each bin the mean of field `name` over the runs.

    A run counts until its end; in the cumulative fields (SO_FAR) its final value counts afterwards, too.
    """
    longest = max(runs, key=lambda series: series.hours[-1])
    values = []
    for hour in longest.hours:
        lasting = [series for series in runs if name in SO_FAR or series.hours[-1] >= hour * (1 - 1e-9)]
        each = [getattr(s, name)[min(len(s.hours) - 1, int(hour / s.hours[-1] * len(s.hours) - 1e-6))] for s in lasting]
        values.append(sum(each) / len(each))
    return list(longest.hours), values


def _binned(spans: Sequence[Span], width: float) -> list[float]:
    """Distribute each span's amount over bins of `width` seconds in proportion to overlap; return the bins' sums."""
    bins = [0.0] * BINS
    for begin, end, amount in spans:
        first, last = min(int(begin / width), BINS - 1), min(int(end / width), BINS - 1)
        if first == last or end <= begin:
            bins[first] += amount
            continue
        for i in range(first, last + 1):
            upto = end if i == last else (i + 1) * width
            bins[i] += amount * (upto - max(begin, i * width)) / (end - begin)
    return bins


def _counted(times: Sequence[float], edges: Sequence[float]) -> tuple[int, ...]:
    """Return the number of `times` at or before each edge."""
    ordered = sorted(times)
    return tuple(bisect_right(ordered, edge * (1 + 1e-12)) for edge in edges)
