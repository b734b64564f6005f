"""The node pools that mean the nodes on which a queue has admitted a job's workers."""

from bamboo_operator.queues.flavors import FlavorNodes, pools_on
from operator_kit import job


def test_a_pool_whose_template_selects_other_nodes_does_not_mean_those_of_the_flavor() -> None:
    cards = [{"name": card, "template": {"spec": {"nodeSelector": {"card": card}}}} for card in ("a100", "h100")]
    spec = job(nodePools=[*cards, {"name": "any"}])
    assert [pool.name for pool in pools_on(spec, spec.node_pools, FlavorNodes(labels={"card": "h100"}))] == [
        "h100",
        "any",
    ]
