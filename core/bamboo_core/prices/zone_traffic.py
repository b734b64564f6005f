"""What clouds bill for traffic between the zones of a region. Pure."""

from typing import Final

GB: Final = 1e9
# USD for a GB that crosses zones, billed to the one that sends it and again to the one that receives it: what EC2 takes
# "in each direction". See docs/simulator.md for other clouds.
ZONE_TRAFFIC_PRICE: Final = 0.01


def traffic_usd(billed: float, price: float = ZONE_TRAFFIC_PRICE) -> float:
    """The USD for so many bytes that cross zones. price: USD for each GB, and for each of both ways."""
    return billed / GB * 2 * price
