"""Control of one job's pods: their creation, deletion, moves between node pools, and startup problems."""
