"""Every Python that a test starts reads this first: a launcher of workers becomes the stand-in of a warm one."""

import os
import sys

LAUNCHER = ["-P", "-m", "bamboo_trainer.worker.launch.launcher"]

if "BAMBOO_WARM_LAUNCHERS" in os.environ and sys.orig_argv[1:4] == LAUNCHER and "--bare" not in sys.orig_argv:
    import warm_stand_in

    warm_stand_in.run(os.environ.pop("BAMBOO_WARM_LAUNCHERS"))
