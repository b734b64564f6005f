"""The entrypoint MODULE:FUNCTION of a user's function, which workers import from its file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bamboo.jobs.errors import InvalidRequest


def entrypoint_of(build: Callable[..., Any]) -> tuple[str, Path | None]:
    """Return the entrypoint "module:function", and the folder from which to import it; None for an installed module.

    Raises InvalidRequest for a function that no other process can import, such as one in a notebook's cell.
    """
    name, module = getattr(build, "__qualname__", ""), getattr(build, "__module__", "")
    if not name or not module or not name.isidentifier():
        raise InvalidRequest(f"task: expected a function at the top level of a module, got {build!r:.200}")
    if module == "__main__":
        return _of_script(name)
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise InvalidRequest(f"task: {module}.{name} is in no file, from which the workers could import it")
    depth = module.count(".") + (Path(file).name == "__init__.py")
    folder = Path(file).resolve().parents[depth]
    return f"{module}:{name}", None if "site-packages" in folder.parts else folder


def _of_script(name: str) -> tuple[str, Path]:
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or hasattr(sys, "ps1") or not Path(file).stem.isidentifier():
        raise InvalidRequest(
            f"task: {name} is only in this notebook or session, and the workers import it from a file; begin its cell"
            f" with %%writefile my_task.py, then say import my_task and task=my_task.{name}"
        )
    path = Path(file).resolve()
    if spec is None:
        return f"{path.stem}:{name}", path.parent
    return f"{spec.name}:{name}", path.parents[spec.name.count(".")]  # python -m package.module
