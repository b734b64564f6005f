"""Calls of the API server are told apart by resource."""

import pytest

from bamboo_operator.kube.api_calls import resource_of


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/a/pods", "pods"),
        ("/api/v1/namespaces/a/pods/x-w1", "pods"),
        ("/api/v1/namespaces/namespaces/pods/pods", "pods"),
        ("/apis/bamboo.dev/v1alpha1/namespaces/a/bamboojobs/x/status", "bamboojobs/status"),
        ("/apis/authentication.k8s.io/v1/tokenreviews", "tokenreviews"),
        ("/apis/networking.k8s.io/v1/namespaces/a/networkpolicies", "networkpolicies"),
    ],
)
def test_calls_are_told_apart_by_resource_and_not_by_name(path: str, resource: str) -> None:
    assert resource_of(path) == resource
