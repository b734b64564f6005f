"""The process that outlives a cluster with real nodes: `python -m cluster.janitor FOLDER GROUP_PREFIX`.

It waits for the end of its standard input, which the cluster's host closes at its own end, even if it is killed. The
kernel removes processes, mounts and interfaces; the janitor removes the cgroups and the folder.
"""

import shutil
import sys
from pathlib import Path

from cluster import cgroups


def main() -> None:
    folder, prefix = Path(sys.argv[1]), sys.argv[2]
    sys.stdin.read()
    for group in {path.name for path in cgroups.FREEZER.glob(f"{prefix}*")}:
        cgroups.remove(group)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
