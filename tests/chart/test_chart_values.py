"""The chart's values: their documentation, and the messages about wrong ones."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from helm_kit import CHART, Helm, HelmError, Json

pytest_plugins = ["chart_kit"]

VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Json = json.loads((CHART / "values.schema.json").read_text())


MARK: Json = {"reason": "Repair", "label": {"key": "rack.example/repair"}, "noticeSeconds": 60}


KEY = re.compile(r"( *)([A-Za-z]\w*):")


def comments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the path and comment of each value that has a comment directly above it."""
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip(" #"))
            continue
        if found := KEY.match(line):
            indent = len(found[1])
            stack = [*((depth, key) for depth, key in stack if depth < indent), (indent, found[2])]
            if comment:
                yield ".".join(key for _, key in stack), " ".join(comment)
        comment = []


def test_every_value_is_documented() -> None:
    documented = dict(comments((CHART / "values.yaml").read_text()))
    assert all(re.fullmatch(r"\S.*\.", comment) for comment in documented.values())
    for path, properties in sections(SCHEMA):
        for name in properties:
            assert f"{path}.{name}".lstrip(".") in documented or (path, name) in UNDOCUMENTED
    assert all(
        any(path == f"{at}.{name}".lstrip(".") for at, found in sections(SCHEMA) for name in found)
        for path in documented
    )


UNDOCUMENTED = {
    ("", "global"),  # that of a parent chart
    *(("tls.certManager.issuerRef", name) for name in ("name", "kind", "group")),
}


def sections(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the path and properties of each object in the schema; fail if one allows additional properties."""
    if "properties" in schema:
        assert schema["additionalProperties"] is False, path
        yield path, schema["properties"]
        for name, inner in schema["properties"].items():
            yield from sections(inner, f"{path}.{name}".lstrip("."))


def test_the_schema_takes_the_defaults() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 0}, r"replicas.*(minimum|greater than)"),
        ({"unknown": 1}, r"additional propert.*'?unknown"),
        ({"image": {"repository": "Upper"}}, r"image.repository.*does not match"),
        ({"image": {"digest": "sha256:abc"}}, r"image.digest.*does not match"),
        ({"image": {"pullPolicy": "Sometimes"}}, r"image.pullPolicy.*must be one of"),
        ({"tls": {"mode": "SSL"}}, r"tls.mode.*must be one of.*SelfSigned"),
        ({"tls": {"mode": "Secret"}}, r"tls.existingSecret: expected the name of a Secret"),
        ({"tls": {"mode": "CertManager"}}, r"tls.mode: CertManager needs cert-manager"),
        ({"tls": {"ipAddresses": ["here"]}}, r"tls.ipAddresses.0.*does not match"),
        ({"tls": {"selfSigned": {"days": 0}}}, r"tls.selfSigned.days.*(minimum|greater than)"),
        ({"url": "http://x:1"}, r"url.*does not match"),
        ({"url": "ws://x:1"}, r"url: expected wss://HOST:PORT, for tls.mode is SelfSigned"),
        ({"url": "wss://x:1", "tls": {"mode": "Off"}}, r"url: expected ws://HOST:PORT, for tls.mode is Off"),
        ({"watchNamespaces": "team-a"}, r"watchNamespaces.*(got string, want array|Expected: array)"),
        ({"watchNamespaces": ["Team"]}, r"watchNamespaces.0.*does not match"),
        ({"nodeMarks": [{"taint": {"key": "a/b"}, "gone": True}]}, r"nodeMarks.0.*reason"),
        ({"nodeMarks": [MARK | {"reason": "in words"}]}, r"nodeMarks.0.reason.*does not match"),
        ({"nodeMarks": [MARK | {"label": {"key": "no spaces"}}]}, r"nodeMarks.0.label.key.*does not match"),
        (
            {"nodeMarks": [MARK, MARK | {"taint": {"key": "a/b"}}]},
            r"nodeMarks\[1\]: expected exactly one of taint, label, annotation and condition, got taint and label",
        ),
        ({"nodeMarks": [MARK | {"gone": True}]}, r"nodeMarks\[0\]: expected noticeSeconds or gone: true, got both"),
        ({"workers": {"runAsUser": "root"}}, r"workers.runAsUser.*(got string, want integer|Expected: integer)"),
        ({"networkPolicy": {"workersFrom": ["10.0.0.0/33"]}}, r"networkPolicy.workersFrom.0.*does not match"),
        ({"networkPolicy": {"workersFrom": ["10.0.256.0/8"]}}, r"networkPolicy.workersFrom.0.*does not match"),
        ({"networkPolicy": {"workersFrom": ["fd00::/129"]}}, r"networkPolicy.workersFrom.0.*does not match"),
        ({"monitoring": {"enabled": True}}, r"monitoring.enabled: needs the Prometheus operator"),
        ({"monitoring": {"runbookBaseUrl": "docs"}}, r"monitoring.runbookBaseUrl.*does not match"),
        ({"monitoring": {"interval": "often"}}, r"monitoring.interval.*does not match"),
    ],
)
@pytest.mark.parametrize("major", [pytest.param("3", marks=pytest.mark.slow), "4"])
def test_what_is_wrong_is_said(homes: Path, major: str, values: Json, message: str) -> None:
    with pytest.raises(HelmError) as refused:
        Helm(homes, major=major).template(values)
    text = str(refused.value).replace("at '/", "at '").replace("/", ".")  # Helm 4 writes paths with slashes
    assert re.search(message.replace("//", ".."), text, re.IGNORECASE | re.DOTALL), refused.value


def test_kubernetes_before_1_29_is_refused(chart: Helm) -> None:
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.29"):
        chart.template(kubernetes="1.28.0")
