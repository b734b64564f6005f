"""A journey: through which functions a thing goes, from marks that are named to hops that are counted.

**Marks** are named: where the thing starts, where it becomes another thing, where it is handed over, where it ends. All
else is recorded. From mark to mark the thing goes with the recorded calls: from the one up to the call that both were
made in, and down to the other. At a hand-over it goes on in the call that takes it out: of a queue of this process
(`Through.QUEUE`, also a record that keeps it until its time), or of what the network brings (`Through.NETWORK`).

A **hop** is a step into another module; a return to a call in which the thing has been is none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from recorder import Call, Function, Said, Seen

Facts = dict[str, object]


class Through(Enum):
    """By what a thing comes to a mark."""

    CALLS = "calls"
    QUEUE = "queue"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Mark:
    """A call of a function that the journey leads to.

    said: what a call's arguments say; None of other calls. What two marks say by one name has to be the same.
    where: the name by which marks speak of the process. Of hand-overs kept_by and taken_by are the functions that put
    the thing into what it is handed over in, and take it out, if those are not the mark before and this one, but made
    the calls of them. first: of several such calls the first one is meant, not the last before the next mark.
    """

    function: Function
    said: Said
    where: str
    through: Through = Through.CALLS
    taken_by: str = ""
    kept_by: str = ""
    first: bool = False


def at(place: str, where: str, said: Said | None = None, **more: Any) -> Mark:
    """The mark of a function. place: its module and its name."""
    module, name = place.split(" ")
    return Mark(Function(module, name), said or (lambda _: {}), where, **more)


class Hop(msgspec.Struct):
    """A module that the thing comes to. through: by what; functions: in which it is there, in their order."""

    module: str
    through: Through
    functions: list[str]


class Recorded(msgspec.Struct):
    """A journey that was recorded."""

    title: str
    text: str
    hops: list[Hop]


@dataclass(frozen=True, slots=True)
class Journey:
    """title, text: for the page."""

    title: str
    text: str
    marks: tuple[Mark, ...]

    def recorded(self, seen: Sequence[Seen], first: int) -> Recorded:
        """The journey as it was in what was seen. first: the number of its first mark there. Raises LookupError."""
        chain = _Chain()
        calls = self._found(seen, first)
        for number, (mark, call) in enumerate(zip(self.marks, calls, strict=True)):
            chain.follow(mark, calls[number - 1] if number else None, call)
        return Recorded(title=self.title, text=self.text, hops=chain.hops)

    def _found(self, seen: Sequence[Seen], first: int) -> list[Call]:
        """The calls at the marks, of which the first has that number: of the first thing that came to the end, the last
        call at each mark before the one at the next. Raises LookupError with the mark that none has come to.
        """
        failed = LookupError(f"{self.title}: {self.marks[0].function} was never called")
        for start in range(len(seen)):
            if seen[start].mark == first:
                try:
                    facts, places = self._places(seen, first, start)
                except LookupError as error:
                    failed = error
                else:
                    return self._calls(seen, first, facts, places)
        raise failed

    def _places(self, seen: Sequence[Seen], first: int, start: int) -> tuple[Facts, list[int]]:
        """What is known of the thing that starts there, and where the first call at each mark is."""
        facts: Facts = {}
        places: list[int] = []
        place = start
        for number, mark in enumerate(self.marks):
            later = range(place, len(seen)) if places else (start,)
            place = next((i for i in later if _fits(seen[i], mark, first + number, facts)), -1)
            if place < 0:
                raise LookupError(f"{self.title}: {mark.function} was not come to, with {facts}")
            places.append(place)
            facts |= {**seen[place].said, mark.where: seen[place].process}
        return facts, places

    def _calls(self, seen: Sequence[Seen], first: int, facts: Facts, places: Sequence[int]) -> list[Call]:
        calls: list[Call] = []
        place = places[-1]
        for number, mark in reversed(list(enumerate(self.marks))):
            place = places[number] if mark.first else place
            while not _fits(seen[place], mark, first + number, facts):
                place -= 1
            calls.append(seen[place].call)
        return calls[::-1]


def _fits(seen: Seen, mark: Mark, number: int, facts: Mapping[str, object]) -> bool:
    """Does that call say nothing else than what is known, and was it made where the mark has it taken out?

    What is handed over may have come too late to wait: then it goes on in the call that brought it, not meant here.
    """
    said = {**seen.said, mark.where: seen.process}
    known = seen.mark == number and all(facts.get(name, value) == value for name, value in said.items())
    return known and (not mark.taken_by or any(call.function.name == mark.taken_by for call in seen.call.stack()))


class _Chain:
    """hops: so far."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self._been: list[Call] = []
        self._last: Function | None = None

    def follow(self, mark: Mark, before: Call | None, call: Call) -> None:
        """The thing comes from the mark before to this one."""
        if before is None or mark.through is Through.NETWORK:
            self._been, self._last = [], None
        elif mark.kept_by:
            self._go(_up(before, mark.kept_by), Through.CALLS)
        self._go(_way(mark, before, call), mark.through)

    def _go(self, way: Iterable[Call], through: Through) -> None:
        """through: by what the thing comes to the first call; to the others it comes by calls."""
        for call in way:
            if not any(call is been for been in self._been):
                self._been.append(call)
                self._enter(call.function, through)
            self._last, through = call.function, Through.CALLS

    def _enter(self, function: Function, through: Through) -> None:
        if self._last is None or self._last.module != function.module:
            self.hops.append(Hop(function.module, through, [function.name]))
        elif self.hops[-1].module == function.module:
            self.hops[-1].functions.append(function.name)


def _up(call: Call, name: str) -> Iterator[Call]:
    """The calls in which that one was made, from the innermost to that of the function of that name."""
    outer = call.caller
    while outer is not None:
        yield outer
        if outer.function.name == name:
            return
        outer = outer.caller
    raise LookupError(f"{call.function} was not called by {name}")


def _way(mark: Mark, before: Call | None, call: Call) -> Iterator[Call]:
    """The calls from one mark to the next, both among them."""
    stack = call.stack()
    if before is None or mark.through is not Through.CALLS:
        taken_by = mark.taken_by or call.function.name
        names = [one.function.name for one in stack]
        if taken_by not in names:
            raise LookupError(f"{call.function} was not called by {taken_by}, but {names}")
        yield from stack[len(names) - 1 - names[::-1].index(taken_by) :]
        return
    earlier = before.stack()
    common = sum(1 for one, other in zip(earlier, stack, strict=False) if one is other)
    if not common:
        raise LookupError(f"{call.function} was not called by what called {before.function}")
    yield from reversed(earlier[common - 1 :])
    yield from stack[common:]
