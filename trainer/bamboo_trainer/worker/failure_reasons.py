"""Why a worker ends, as reported to the coordinator and to people."""

import logging
from typing import Final

from bamboo_core.names import EXIT_FAILED
from bamboo_trainer.compilation.toolchain import CompilerUnavailable
from bamboo_trainer.memory.placement import DeviceError
from bamboo_trainer.tasks.task_errors import (
    NotDeterministic,
    TaskError,
    TaskOutOfMemory,
    is_tasks,
    ran_out_of_memory,
    told,
)

logger = logging.getLogger(__name__)

# This machine lacks something, or refuses access: the message is complete, and a traceback adds nothing.
SELF_EXPLANATORY: Final = (DeviceError, CompilerUnavailable)


def failure_reason(error: BaseException) -> str:
    """Return the reason for an error that ends the worker: the machine's, the task's, memory, or a bug."""
    if isinstance(error, DeviceError):
        return "DeviceUnavailable"
    if isinstance(error, CompilerUnavailable):
        return "CompilerUnavailable"
    if ran_out_of_memory(error):
        return "OutOfMemory"
    if isinstance(error, NotDeterministic):
        return "NotDeterministic"
    return "TaskFailed" if isinstance(error, TaskError) or is_tasks(error) else "WorkerError"


def failure_message(error: BaseException) -> str:
    """Return one line, with the place."""
    return str(error) if isinstance(error, TaskError | TaskOutOfMemory) else told(error)


def exit_code(error: SystemExit) -> int:
    """Return the exit code as Python does: log what is no number, and return 1."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    logger.error("%s", error.code)
    return EXIT_FAILED
