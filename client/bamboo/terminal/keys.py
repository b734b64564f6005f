"""What the keys do while a job runs on a terminal. Pure: (keys so far, key, status, time) -> (keys, request).

No single key does harm: a worker's letter and q only ask, and a capital letter then does what was asked about.
"""

from dataclasses import dataclass, replace

from bamboo.preemption.scheduling import NOTICE_SECONDS
from bamboo.terminal.view import StopJob, TakeWorker, UserRequest
from bamboo_core.coordinator.events import Status
from bamboo_core.planning.plan import WorkerId

LETTERS = "abcdefghijklmnoprstuvwxyz"  # without q, which stops
ANSWER_SECONDS = 10.0  # for which a question stands
HINT = "a worker's letter: take it away   ?: help   q: stop"
QUIT_HINT = "q: stop"
HELP = (
    "the letter before a worker's name: asks whether to take that worker away; then",
    f"  K kills it at once (SIGKILL), N gives it {NOTICE_SECONDS:.0f} s notice, as a cloud would",
    "q: asks whether to stop the job; then Q stops it, and what it trained is lost",
    "Ctrl-C: stops it without asking   ?: shows or hides this",
    "green: training, cyan: standby, yellow: syncing (receives a copy), magenta: leaving, red: lost",
    "unprotected: no other worker (none on another node, if they have several) holds that stage's state now",
    "slow: it takes longer than others would, and holds the job up by that",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys that a terminal takes, and the question that is open."""

    disturb: bool = True  # workers may be taken away
    help: bool = False
    asked: float | None = None  # when
    about: WorkerId | None = None  # whom the open question is about, None for the job

    def press(self, key: str, status: Status, now: float) -> tuple["Keys", UserRequest | None]:
        """What is open after that key, and what the user wants done. A key that answers no question closes it."""
        now_open = self.is_open(now)
        closed = replace(self, asked=None, about=None)
        if now_open:
            return closed, self._answer(key)
        if key == "?":
            return replace(closed, help=not self.help), None
        if key == "q":
            return replace(closed, asked=now), None
        if self.disturb and (worker := worker_of(key, status)) is not None:
            return replace(closed, asked=now, about=worker), None
        return closed, None

    def is_open(self, now: float) -> bool:
        return self.asked is not None and now - self.asked < ANSWER_SECONDS

    def question(self, now: float) -> str:
        """What is asked at the moment; "" if nothing is."""
        if not self.is_open(now):
            return ""
        if self.about is None:
            return "Stop the job? Q stops it, any other key continues"
        return f"Take {self.about} away? K kills it, N gives it {NOTICE_SECONDS:.0f} s notice, any other key cancels"

    def hints(self) -> tuple[str, ...]:
        """The line below the picture, or all of the help."""
        if self.help:
            return HELP if self.disturb else HELP[2:]
        return (HINT if self.disturb else QUIT_HINT,)

    def _answer(self, key: str) -> UserRequest | None:
        if self.about is None:
            return StopJob() if key == "Q" else None
        return TakeWorker(self.about, notice=key == "N") if key in ("K", "N") else None


def letter(worker: WorkerId) -> str:
    """A worker's key, the same as long as it lives."""
    number = int("".join(c for c in worker if c in "0123456789") or "0")
    return LETTERS[number % len(LETTERS)]


def worker_of(key: str, status: Status) -> WorkerId | None:
    return next((worker for worker, _ in status.workers if letter(worker) == key), None)
