"""One YAML or JSON file -> its document. Bounded and strict; whatever is wrong is a ManifestError."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from bamboo.fields import ManifestError, Problem, show

MAX_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Safe YAML as Kubernetes reads it: no duplicate keys, dates stay text, 1e-3 is a number.

    Merge keys are refused: a few of them, nested, double in size at every level.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are refused", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a string", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {show(key)}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def load_document(path: str) -> dict[str, Any]:
    """The file's one object, as it is written: what its fields are is for `parse_manifest` to judge."""

    def wrong(message: str) -> ManifestError:
        return ManifestError(Problem(path, message))

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise wrong("no such file") from None
    except (OSError, ValueError) as error:
        raise wrong(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise wrong("larger than 1 MiB")
    try:
        documents = [d for d in yaml.load_all(raw.decode("utf-8-sig"), _Loader) if d is not None]  # noqa: S506
    except UnicodeDecodeError:
        raise wrong("not valid YAML: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise wrong(f"not valid YAML{where}: {' '.join((error.problem or 'unreadable').split())}") from None
    except RecursionError:
        raise wrong("not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # NB: PyYAML lets the errors of explicit tags (`!!int ""`, `!!bool x`) through as they are.
        raise wrong(f"not valid YAML: {getattr(error, 'reason', None) or 'a value does not fit its tag'}") from None
    if len(documents) != 1:
        raise wrong(f"expected one document, got {len(documents)}" if documents else "the file is empty")
    if not isinstance(documents[0], dict):
        raise ManifestError(Problem("manifest", f"expected an object, got {show(documents[0])}"))
    return documents[0]
