"""Where a task's code is, as another thread sees it: the layer, and the user's line."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getsourcelines

import torch
from torch import nn

from bamboo_trainer.tasks.user_code import run_layer
from bamboo_trainer.telemetry.place import place_of

SECONDS = 60.0


class Held(nn.Module):
    """Waits until it may go on."""

    def __init__(self, held: threading.Event, free: threading.Event) -> None:
        super().__init__()
        self.held, self.free = held, free

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.held.set()
        assert self.free.wait(SECONDS)
        return given + 1


@contextmanager
def thread_at(work: Callable[[threading.Event, threading.Event], object]) -> Iterator[int]:
    """A thread that is inside of what waits for the second event."""
    held, free = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(held, free))
    thread.start()
    assert held.wait(SECONDS)
    assert thread.ident is not None
    yield thread.ident
    free.set()
    thread.join(SECONDS)


def test_a_layer_that_hangs_is_named_with_the_line() -> None:
    with thread_at(lambda held, free: run_layer(Held(held, free), 3, (torch.ones(2),))) as thread:
        place = place_of(thread)
    lines, first = getsourcelines(Held.forward)
    line = first + next(number for number, text in enumerate(lines) if "free.wait" in text)
    assert place.startswith("layer 3 (Held), ")
    assert place.endswith(f"test_place.py line {line}, in forward")


def test_a_thread_that_has_ended_is_nowhere() -> None:
    with thread_at(lambda held, free: (held.set(), free.wait(SECONDS))) as thread:
        pass
    assert "layer" not in place_of(thread)
