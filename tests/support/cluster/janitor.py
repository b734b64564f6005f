"""The process that cleans up after a cluster with real nodes: `python -m cluster.janitor FOLDER GROUP_PREFIX`.

Its standard input ends when the cluster's host ends, even if the host is killed. The kernel then removes processes,
mounts and interfaces; the janitor removes the cgroups and the folder.
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
