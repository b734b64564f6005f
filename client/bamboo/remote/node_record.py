"""`traces fetch`: what the operator has recorded of the nodes that workers ran on."""

import base64
import binascii
import sys
from pathlib import Path

from bamboo.remote.session import Session
from bamboo_core.complaints import system_reason
from bamboo_core.kube.errors import RemoteError
from bamboo_core.kube.request_parts import Object
from bamboo_core.names import EXIT_OK, LABEL_NODE_RECORD, NODE_RECORD_KEY
from bamboo_core.traces.compressed import text_of
from bamboo_core.traces.json_lines import parse_json_lines
from bamboo_core.traces.trace import NodeTraceError


async def fetch(session: Session, output: Path | None) -> int:
    """From the operator's namespace, to the file or to standard output; a record that is damaged is refused."""
    path = f"/api/v1/namespaces/{session.namespace}/configmaps"
    found = await session.api.listed(path, {"labelSelector": f"{LABEL_NODE_RECORD}=true"})
    text = _text(found, session.namespace)
    if output is None:
        sys.stdout.write(text)
        return EXIT_OK
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RemoteError(f"cannot write {output}: {system_reason(error)}") from None
    return EXIT_OK


def _text(config_maps: list[Object], namespace: str) -> str:
    """Raises RemoteError unless there is exactly one, and it can be read."""
    if len(config_maps) != 1:
        names = ", ".join(str(one["metadata"]["name"]) for one in config_maps)
        raise RemoteError(
            f"namespace {namespace} has {len(config_maps)} records of nodes ({names}); expected one"
            if names
            else f"namespace {namespace} has no record of nodes: expected the namespace of an operator with nodeRecord,"
            " whose jobs' workers have run for a minute"
        )
    name = config_maps[0]["metadata"]["name"]
    try:
        text = text_of(
            base64.b64decode((config_maps[0].get("binaryData") or {}).get(NODE_RECORD_KEY, ""), validate=True)
        )
        parse_json_lines(name, text)
    except (NodeTraceError, binascii.Error) as error:
        raise RemoteError(f"ConfigMap {namespace}/{name}: {error}") from None
    return text
