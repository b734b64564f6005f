"""Python imports this before anything else: a process that is told where the library is has pretended GPUs."""

import os
from pathlib import Path

if library := os.environ.get("PRETENDED_GPU"):
    from pretended_gpu import begin

    begin(Path(library))
