"""A process that has an end of a one-sided connection and does what it is told, a line each; its first word is "here".

    target               make one, say where it is
    source LANDING       make one that writes there
    begin VALUE          begin to write a slot full of that value
    once                 go on with it for a moment
    finish               go on with it until its end
    close                the end

It answers with what came of it: one of the words below. While it waits it takes in what others write.
"""

import base64
import importlib
import select
import sys
from typing import Final

from bamboo_trainer.transport.one_sided.contract import OneSided, WriteSource, WriteTarget
from process_writes import ProcessWrites

WRITTEN: Final = "written"
UNDER_WAY: Final = "under way"
LOST: Final = "lost"
DONE: Final = "done"
LOOK_SECONDS: Final = 1e-4


def go_on(source: WriteSource, transfer: int) -> str:
    """What has become of a write by now."""
    return WRITTEN if source.written(transfer) else UNDER_WAY


class Peer:
    def __init__(self, way: OneSided) -> None:
        self._way, self._transfer = way, 0
        self._source: WriteSource | None = None
        self._target: WriteTarget | None = None

    def take_in(self) -> None:
        """For a moment at most."""
        if self._target is not None:
            self._target.progress()

    def do(self, word: str, argument: str = "") -> str:
        if word == "target":
            self._target = self._way.target("peer")
            return base64.b64encode(self._target.landing()).decode()
        if word == "source":
            self._source = self._way.source("peer", base64.b64decode(argument))
            return DONE
        assert self._source is not None
        if word == "begin":
            slot = self._source.slot(0)
            slot[:] = int(argument)
            self._transfer = self._source.write(0, len(slot))
            return DONE
        if word == "close":
            self._source.close()
            return DONE
        outcome = go_on(self._source, self._transfer)
        while word == "finish" and outcome == UNDER_WAY:
            outcome = go_on(self._source, self._transfer)
        return outcome


def main() -> None:
    # torch and NIXL take seconds to import
    nixl = "bamboo_trainer.transport.nixl.agent"
    peer = Peer(ProcessWrites() if sys.argv[1] == "processes" else importlib.import_module(nixl).Nixl())
    print("here", flush=True)
    while True:
        while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            peer.take_in()
        words = sys.stdin.readline().split()
        if not words:
            return
        try:
            answer = peer.do(*words)
        except ConnectionError:
            answer = LOST
        print(answer, flush=True)


if __name__ == "__main__":
    main()
