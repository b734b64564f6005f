"""Why a worker ends, as the coordinator and a person hear it."""

import errno
import logging

import pytest
import torch

from bamboo_core.names import EXIT_FAILED
from bamboo_trainer.compilation.toolchain import CompilerUnavailable
from bamboo_trainer.memory.placement import DeviceError
from bamboo_trainer.tasks.task_errors import NotDeterministic, TaskError, TaskOutOfMemory
from bamboo_trainer.worker.failure_reasons import exit_code, failure_message, failure_reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TaskError("layer 3 is wrong"), "TaskFailed"),
        (NotDeterministic("layer 3 draws"), "NotDeterministic"),
        (TaskOutOfMemory("in layer 3"), "OutOfMemory"),
        (MemoryError(), "OutOfMemory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OutOfMemory"),
        (OSError(errno.ENOSPC, "No space left on device"), "WorkerError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OutOfMemory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), "OutOfMemory"),
        (ValueError("out of memory"), "WorkerError"),
        (DeviceError("no GPU"), "DeviceUnavailable"),
        (CompilerUnavailable("no compiler"), "CompilerUnavailable"),
        (RuntimeError("a bug"), "WorkerError"),
    ],
)
def test_an_error_is_the_machines_the_tasks_about_memory_or_a_bug(error: Exception, reason: str) -> None:
    assert failure_reason(error) == reason


def test_our_own_sentences_stand_alone_and_others_have_their_type() -> None:
    assert failure_message(TaskError("layer 3 is wrong")) == "layer 3 is wrong"
    assert failure_message(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (3, 3), (256, 0), (-1, 255), ("help", EXIT_FAILED)])
def test_an_exit_is_that_of_python(code: int | str | None, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert exit_code(SystemExit(code)) == expected
    assert caplog.messages == (["help"] if isinstance(code, str) else [])
