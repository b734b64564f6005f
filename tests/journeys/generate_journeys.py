"""Writes the journeys in journeys.md from what the code does: `make docs`. A test fails if they are stale.

Needs a C++ compiler for pretended GPUs. --record: prints what is recorded, in a process that has such GPUs.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

import pretended_gpu
from folders import TESTS
from journey import Hop, Recorded, Through

PAGE: Final = TESTS / "journeys" / "journeys.md"
BEGIN: Final = "<!-- journeys: made by `make docs` from the calls that tests/journeys records -->\n"
END: Final = "<!-- end of journeys -->\n"
ARROWS: Final = {Through.CALLS: "", Through.QUEUE: "⇒ ", Through.NETWORK: "⇝ "}
SECONDS: Final = 240.0  # for the whole recording


def page(text: str, journeys: Sequence[Recorded]) -> str:
    """The page with its journeys written anew; everything else stays."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} lacks the comments between which the journeys belong"
    return before + BEGIN + "\n" + "\n".join(line for one in journeys for line in _section(one)) + "\n" + END + after


def _section(journey: Recorded) -> Iterator[str]:
    yield from (f"## {journey.title}", "", journey.text, "")
    yield from (f"{number}. {_line(hop)}" for number, hop in enumerate(journey.hops, 1))
    yield ""


def _line(hop: Hop) -> str:
    """The module, the function that the thing comes to, and the one that it leaves from."""
    functions = (f"`{name}`" for name in dict.fromkeys((hop.functions[0], hop.functions[-1])))
    return f"{ARROWS[hop.through]}`{hop.module}` {'…'.join(functions)}"


def recorded() -> list[Recorded]:
    """The journeys, recorded in a process of its own: torch looks for GPUs while it is imported. With the same seed of
    hashes sets of names have the same order. Raises CalledProcessError with what that process has said.
    """
    paths = os.pathsep.join(str(TESTS / folder) for folder in ("support", "simulation"))
    there = pretended_gpu.environment(pretended_gpu.built(), {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"})
    command = [sys.executable, __file__, "--record"]
    done = subprocess.run(command, env=there, capture_output=True, check=True, timeout=SECONDS)
    return msgspec.json.decode(done.stdout, type=list[Recorded])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        from course import record  # its imports take seconds, and are of a process with such GPUs
        from journeys import JOURNEYS

        sys.stdout.buffer.write(msgspec.json.encode(record(JOURNEYS)))
        return 0
    try:
        PAGE.write_text(page(PAGE.read_text(), recorded()))
    except subprocess.CalledProcessError as error:
        print(error.stderr if isinstance(error.stderr, str) else error.stderr.decode(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
