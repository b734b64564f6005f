"""Placement of a pod on the nodes of a pool."""

from typing import Any

from bamboo_core.job.node_placement import NodePlacement


def place(spec: dict[str, Any], where: NodePlacement) -> None:
    """Restrict a pod's spec to these nodes, in addition to its own restrictions."""
    if where.selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **where.selector}
    asked = list(spec.get("tolerations") or ())
    if tolerations := [*asked, *(dict(t) for t in where.tolerations if t not in asked)]:
        spec["tolerations"] = tolerations
    if where.expressions:
        affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
        terms = required.get("nodeSelectorTerms") or [{}]  # the terms are alternatives
        ours = [dict(e) for e in where.expressions]
        required["nodeSelectorTerms"] = [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *ours]} for term in terms
        ]
