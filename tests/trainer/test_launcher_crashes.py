"""What is told of a crash: the user's frames, and what they called."""

import torch

from bamboo_trainer.worker import launcher
from bamboo_trainer.worker.launcher import read_crash

TORCH, LAUNCHER = torch.__file__, launcher.__file__


def dump(*files: str) -> str:
    frames = "".join(f'  File "{file}", line {number} in f{number}\n' for number, file in enumerate(files, start=1))
    head = "Fatal Python error: Bus error\n\nCurrent thread 0x0001 (most recent call first):\n"
    return f"{head}{frames}\nExtension modules: numpy, torch._C (total: 2)\n"


def test_frames_end_with_the_users_outermost_one() -> None:
    crash = read_crash(dump(TORCH, "/home/me/layers.py", TORCH, "/home/me/task.py", TORCH, LAUNCHER, LAUNCHER))
    assert crash is not None
    assert (crash.error, crash.place) == ("Bus error", "/home/me/layers.py line 2, in f2")
    assert [frame.rpartition(" ")[2] for frame in crash.frames] == ["f1", "f2", "f3", "f4"]
    said = crash.lines("w1")
    assert said.splitlines()[0] == "w1 crashed: Bus error (most recent call first)"
    assert said.splitlines()[-1] == "  and 3 frames further out, of libraries and Bamboo"
    assert "Extension modules" not in said


def test_without_a_frame_of_the_users_all_are_told() -> None:
    crash = read_crash(dump(TORCH, LAUNCHER))
    assert crash is not None
    assert (crash.place, len(crash.frames), crash.left_out) == ("", 2, 0)
    deep = read_crash(dump(*[TORCH] * 100))
    assert deep is not None
    assert (len(deep.frames), deep.left_out) == (30, 70)


def test_a_process_that_did_not_crash_has_nothing_to_tell() -> None:
    assert read_crash("") is None
    assert read_crash("Timeout (0:00:10)!\n") is None
