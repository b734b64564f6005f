"""Records through which of the product's functions a thing goes: who called whom, at the functions that are looked for.

Every call of a function of the product is followed (`sys.setprofile`, in all threads), and remembered only as long as
it runs, or if a function that is looked for is called below it.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from folders import ROOT

ROOTS = tuple(str(ROOT / folder) + "/" for folder in ("core", "client", "trainer", "operator"))
RESUMED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR  # code that is left and gone on with
Said = Callable[[Mapping[str, Any]], Mapping[str, object] | None]  # of a call's arguments; None: it is not meant


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the product: the path of its module below its distribution's folder, and its name there."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module} {self.name}"


Wanted = Mapping[Function, Sequence[tuple[int, Said]]]


@dataclass(eq=False, slots=True)
class Call:
    """A call of a function, and the call of the product's that it was made in."""

    function: Function
    caller: "Call | None"

    def stack(self) -> list["Call"]:
        """The calls from the outermost one to this one."""
        found: list[Call] = []
        call: Call | None = self
        while call is not None:
            found.append(call)
            call = call.caller
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Seen:
    """A call of a function that is looked for. at: seconds, of a clock that all processes share."""

    at: float
    process: str
    mark: int
    call: Call
    said: Mapping[str, object]


class Recorder:
    """wanted: the functions that are looked for, each with the numbers of its marks and what they have to know.

    What fails in following a call is raised in the end: Python would throw it into the product's function, and follow
    no more of this thread's calls.
    """

    def __init__(self, process: str, wanted: Wanted) -> None:
        self._process, self._wanted = process, wanted
        self._functions: dict[CodeType, Function | None] = {}
        self._calls: dict[int, Call] = {}  # by the id of its frame, while that runs
        self._failed: Exception | None = None
        self.seen: list[Seen] = []

    def __enter__(self) -> "Recorder":
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if self._failed is not None:
            raise self._failed

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        try:
            self._follow(frame, event)
        except Exception as error:
            self._failed = self._failed or error

    def _follow(self, frame: FrameType, event: str) -> None:
        if event == "call":
            code = frame.f_code
            try:
                function = self._functions[code]
            except KeyError:
                function = self._functions[code] = _function_of(code)
            if function is not None:
                self._called(frame, function)
        elif event == "return" and not frame.f_code.co_flags & RESUMED:
            self._calls.pop(id(frame), None)

    def _called(self, frame: FrameType, function: Function) -> None:
        call = self._calls.get(id(frame))
        if call is None or call.function is not function:  # else a coroutine goes on
            call = self._calls[id(frame)] = Call(function, self._caller(frame))
        for mark, said in self._wanted.get(function, ()):
            if (facts := said(frame.f_locals)) is not None:
                self.seen.append(Seen(time.monotonic(), self._process, mark, call, facts))

    def _caller(self, frame: FrameType) -> Call | None:
        outer = frame.f_back
        while outer is not None:
            if (caller := self._calls.get(id(outer))) is not None:
                return caller
            outer = outer.f_back
        return None


def _function_of(code: CodeType) -> Function | None:
    root = next((root for root in ROOTS if code.co_filename.startswith(root)), None)
    if root is None or code.co_name.startswith("<"):
        return None
    return Function(code.co_filename.removeprefix(root), code.co_qualname.replace(".<locals>", ""))
