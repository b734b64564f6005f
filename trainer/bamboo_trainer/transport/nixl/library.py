"""NVIDIA's library, which is an extra: found when a job asks for it, and kept from changing this process's logging."""

import functools
import importlib
import logging
import os
from types import ModuleType

import torch

from bamboo_trainer.transport.bodies import TransportUnavailable

EXTRA = "pip install 'bamboo-trainer[nixl]' (docs/install.md)"


@functools.cache
def library() -> ModuleType:
    """The build for this torch's CUDA, or any other one: host memory needs none. Raises TransportUnavailable."""
    names = ["nixl_cu12", "nixl_cu13"]
    if str(torch.version.cuda or "").startswith("13."):
        names.reverse()
    for name in names:
        try:
            return _imported(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise TransportUnavailable(_problem(f"{name} needs {error.name}, not installed here")) from error
        except (ImportError, OSError) as error:  # of another machine's architecture, say
            raise TransportUnavailable(_problem(f"{name} cannot be loaded here: {error}")) from error
    raise TransportUnavailable(_problem(f"the library nixl is not installed: {EXTRA}"))


def _problem(text: str) -> str:
    return f"spec.topology.transport: NIXL: {text}"


def _imported(name: str) -> ModuleType:
    """What it logs goes where everything goes; at import it sets up a handler of its own and a global switch.

    UCX beneath it would catch SIGHUP for its debugger, so that the end of a terminal no longer ended a worker; and
    where it may, it maps GPUs' memory of one process into another, which then is lost with it.
    """
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    os.environ.setdefault("UCX_TLS", "^cuda_ipc")
    raises = logging.raiseExceptions
    try:
        module = importlib.import_module(name)
    finally:
        logging.raiseExceptions = raises
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return module
