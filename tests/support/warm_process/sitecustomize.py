"""Startup code of the processes that tests start: workers' launchers and `offline` let warm processes do their work."""

import os
import sys

PLACE = "BAMBOO_WARM_PROCESSES"
MODULES = ("bamboo_trainer.offline", "bamboo_trainer.worker.launcher")

module = sys.orig_argv[3] if sys.orig_argv[1:3] == ["-P", "-m"] else ""
if PLACE in os.environ and module in MODULES and "--bare" not in sys.orig_argv:
    import warm_stand_in

    if warm_stand_in.alike(os.environ[PLACE]):
        warm_stand_in.run(os.environ[PLACE])
