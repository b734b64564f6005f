"""Signals while a command is imported, and held signals."""

import signal
import subprocess
import sys

import pytest

from bamboo.stop_signals import STOP_SIGNALS, end_by_exception, held

# The signal comes when the module named by the last argument is about to be imported.
DRIVER = """
import signal, sys
from importlib.abc import MetaPathFinder

number, wanted = int(sys.argv.pop()), sys.argv.pop()

class Striking(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            signal.raise_signal(number)

sys.meta_path.insert(0, Striking())
from bamboo.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("hashlib", signal.SIGINT),
        ("bamboo.cli", signal.SIGINT),
        ("typer", signal.SIGTERM),
        ("bamboo.cli.commands", signal.SIGHUP),
        ("bamboo.local.runner", signal.SIGINT),
        ("asyncio", signal.SIGTERM),
        ("bamboo.local.session", signal.SIGHUP),
    ],
)
def test_a_signal_while_a_command_is_loaded_ends_it_without_a_word(module: str, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "run", "/no/such.yaml", module, str(int(number))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_is_held_comes_again(number: int) -> None:
    before, there = {one: signal.getsignal(one) for one in STOP_SIGNALS}, False
    try:
        end_by_exception()
        with pytest.raises(SystemExit) as ended, held():  # noqa: PT012
            signal.raise_signal(number)
            signal.raise_signal(number)
            there = True
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert (ended.value.code, there) == (130, True)
