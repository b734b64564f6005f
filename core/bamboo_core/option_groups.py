"""Groups of command-line options, each declared once as a dataclass, for typer."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with its dataclass parameters replaced by a typer option for each field. These follow the
    command's own options, in the order of the parameters. A field's annotation and default become the option's.
    """
    own = inspect.signature(command)
    groups = {p.name: p.annotation for p in own.parameters.values() if _is_group(p.annotation)}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**given, **made)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name not in groups]
    parameters += [_parameter(field) for group in groups.values() for field in fields(group)]
    called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _parameter(field: Field[Any]) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)
