"""Module that Python imports at its start. It installs pretended GPUs if PRETENDED_GPU names their library."""

import os
from pathlib import Path

if library := os.environ.get("PRETENDED_GPU"):
    from pretended_gpu import begin

    begin(Path(library))
