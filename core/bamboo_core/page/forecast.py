"""What a job will have cost when its last step is done."""

SECONDS_PER_HOUR = 3600.0


def at_the_end(so_far: float, per_hour: float, seconds_left: float | None) -> float | None:
    """An amount that grows by so much an hour until the last step; None if nobody knows when that is.

    so_far, per_hour: in the unit of the pools' prices. It is what the job costs if it goes on with the nodes, the
    prices and the speed of now.
    """
    return None if seconds_left is None else so_far + per_hour * max(0.0, seconds_left) / SECONDS_PER_HOUR
