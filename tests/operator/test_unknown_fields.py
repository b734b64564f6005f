"""Fields of `worker.template` that no pod has, in the words of the user's manifest."""

import pytest

from bamboo_operator.manifests.unknown_fields import outside_the_spec, refusal
from operator_kit import job


def test_only_what_the_api_server_never_sees_is_told_without_it() -> None:
    template = {"spec": {"nodeSelectr": {}}, "metadata": {"label": {}}, "sepc": {}}
    found = outside_the_spec(job(worker={"template": template}))
    assert len(found) == 2
    assert any("sepc" in one for one in found)
    assert any("label" in one for one in found)
    assert outside_the_spec(job(worker={"template": {"spec": {"nodeSelectr": {}}}})) == ()
    pools = [{"name": "a"}, {"name": "b", "template": {"sepc": {}}}]
    (of_pool,) = outside_the_spec(job(nodePools=pools))
    assert of_pool == "spec.nodePools[1].template.sepc: unknown field, did you mean spec?"


@pytest.mark.parametrize(
    ("template", "message", "said"),
    [
        ({"spec": {"nodeSelectr": {}}}, 'strict decoding error: unknown field "spec.nodeSelectr"', "nodeSelectr"),
        ({"spec": {}}, 'unknown field "spec.containers[0].foo"', "unknown field spec.containers[0].foo of a pod"),
        ({"spec": {}}, "pods is forbidden: exceeded quota", "exceeded quota"),
    ],
)
def test_a_refusal_names_the_field_where_the_user_wrote_it_or_says_what_was_said(
    template: dict[str, object], message: str, said: str
) -> None:
    (sentence,) = refusal(template, message)
    assert said in sentence
    assert sentence.startswith("spec.worker.template")
