"""The document that a job's page is drawn from: the only thing that server and browser share. Times are Unix seconds.

What is not known is null; the sentences in `unknown` say why.
"""

import msgspec

VERSION = 3  # of the document; a page that was loaded before an upgrade asks to be loaded anew
Struct = msgspec.Struct
Point = tuple[int, float, float | None, float | None, float | None]


class PageJob(Struct, frozen=True, kw_only=True, rename="camel"):
    """The job that a page shows."""

    name: str
    namespace: str
    place: str  # local or cluster
    mode: str | None = None
    began: float | None = None  # when the job did
    since: float | None = None  # what is told here was seen since then


class PageState(Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of a job, in a word and a sentence."""

    name: str
    tone: str  # good, warn, bad or idle
    sentence: str
    over: bool = False  # nothing will change any more


class PageProgress(Struct, frozen=True, kw_only=True, rename="camel"):
    """How far a job has come, and how fast it goes on."""

    step: int | None = None
    steps: int | None = None
    stopped_early: str = ""  # why there are fewer steps than are wanted
    grid_choice: str = ""  # which grid was chosen, what was expected of it and of others; "" if none is chosen
    done_by: str = ""  # whether the job will be done by its date
    loss: float | None = None
    first_loss: float | None = None
    gradient_norm: float | None = None  # the global one of the newest step, before clipping
    learning_rate: float | None = None
    samples: int | None = None  # of one step
    samples_per_second: float | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    lost_samples: int | None = None  # of committed steps, those that did not go into them
    not_kept: int = 0  # the steps of a job that has ended, and that no checkpoint and no weights have


class PageEvaluation(Struct, frozen=True, kw_only=True, rename="camel"):
    """The newest one: of the state after which step, and its numbers by name."""

    step: int
    metric: str  # the one that decides which is the best
    metrics: dict[str, float | None]
    # best_step, best_metrics: of that one, if any has a number for it
    best_step: int | None = None
    best_metrics: dict[str, float | None] | None = None


class PageCell(Struct, frozen=True, kw_only=True, rename="camel"):
    """Who runs a stage."""

    worker: str
    label: str
    state: str  # a WorkerState, lost or unknown
    protected: bool | None
    cells: int = 1  # how many it runs in all
    slow: str = ""  # its figures, if it is a straggler


class PageWorker(Struct, frozen=True, kw_only=True, rename="camel"):
    """One that runs no stage."""

    worker: str
    label: str
    state: str


class PageCounts(Struct, frozen=True, kw_only=True, rename="camel"):
    preemptions: int
    takeovers: int
    notices: int | None = None
    restarts: int | None = None


class TakeoverPhases(Struct, frozen=True, kw_only=True, rename="camel"):
    """A takeover's pause in milliseconds, and what was done in it."""

    victim: str
    worker: str
    pipeline: int
    stage: int
    pause: float
    step: int | None = None
    notice: bool | None = None
    decide: float | None = None
    reform: float | None = None
    recompute: float | None = None
    forwards: int | None = None
    backwards: int | None = None


class PageMark(Struct, frozen=True, kw_only=True, rename="camel"):
    """A moment that the page marks."""

    at: float
    kind: str  # notice, loss, takeover or restore
    message: str
    takeover: TakeoverPhases | None = None


class PageEvent(Struct, frozen=True, kw_only=True, rename="camel"):
    at: float
    reason: str
    message: str
    warning: bool = False


class Account(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a worker sends in a step: bytes by kind."""

    worker: str
    label: str
    total: int
    kinds: dict[str, int]


class MemoryRow(Struct, frozen=True, kw_only=True, rename="camel"):
    """The bytes of memory that a worker has taken at most, and may take."""

    worker: str
    label: str
    peak: int
    limit: int


class PoolCost(Struct, frozen=True, kw_only=True, rename="camel"):
    """What the workers of a pool cost."""

    name: str
    capacity: str
    workers: int  # those that are paid for now
    price: str | None = None  # of one for an hour, now


class PageCost(Struct, frozen=True, kw_only=True, rename="camel"):
    """The cost of a job, in the unit that the pools' prices are given in."""

    total: float | None = None  # paid so far
    per_hour: float | None = None
    at_end: float | None = None  # the whole job, if it goes on as now
    pools: tuple[PoolCost, ...] = ()
    sentence: str = ""  # what is missing, if anything


class PageCheckpointWrite(Struct, frozen=True, kw_only=True, rename="camel"):
    """A checkpoint that is being written: so many of its layers are durable."""

    step: int
    written: int
    layers: int
    since: float  # when it began


class PageCheckpoint(Struct, frozen=True, kw_only=True, rename="camel"):
    """The checkpoints of a job."""

    place: str  # where they are, without credentials
    every_steps: int
    # step, at: of the newest one
    step: int | None = None
    at: float | None = None
    # seconds, bytes: that it took, and has
    seconds: float | None = None
    bytes: int | None = None
    writing: PageCheckpointWrite | None = None
    restores: int = 0  # how often the job went back to one
    repeated: int = 0  # the steps that it had to do again
    repeated_seconds: float | None = None  # that these usually take


class PageCondition(Struct, frozen=True, kw_only=True, rename="camel"):
    type: str
    status: str
    reason: str
    message: str
    at: float | None = None


class Document(Struct, frozen=True, kw_only=True, rename="camel"):
    """All that a job's page shows."""

    version: int = VERSION
    now: float
    job: PageJob
    state: PageState
    progress: PageProgress
    counts: PageCounts
    epoch: int | None = None
    grid: tuple[tuple[PageCell, ...], ...] = ()  # [pipeline][stage]
    others: tuple[PageWorker, ...] = ()
    unprotected: tuple[str, ...] = ()
    # [step, time, loss, gradient norm, learning rate]; the step falls where the job went back to a checkpoint
    points: tuple[Point, ...] = ()
    marks: tuple[PageMark, ...] = ()
    events: tuple[PageEvent, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    traffic: tuple[Account, ...] = ()  # what each worker sends in a step
    evaluation: PageEvaluation | None = None  # of a job that has made one
    checkpoint: PageCheckpoint | None = None  # of a job that keeps some
    cost: PageCost | None = None
    conditions: tuple[PageCondition, ...] = ()
    unknown: tuple[str, ...] = ()  # sentences


def encode(document: Document) -> bytes:
    """The document as JSON. A number that is not finite becomes null."""
    return msgspec.json.encode(document)
