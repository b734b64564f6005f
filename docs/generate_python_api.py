"""Generate docs/python-api.md from docstrings for models' authors (`make docs`). A test fails if the page is stale.

The committed page has `Task` in full, but only the first paragraph of other docstrings, and only names of datasets.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parent / "python-api.md"
MODELS = ("gpt", "mlp", "huggingface", "gpt2", "bert", "llama")
SHOWN = {  # what of each module is for a model's author
    "bamboo_trainer.task": (
        *("Parts", "Build", "TrainingFacts", "Task", "Evaluation", "Dataset", "Weighted", "add_loss"),
    ),
    "bamboo_trainer.schedules": (
        *("constant", "linear", "cosine", "polynomial", "inverse_sqrt", "milestones", "one_cycle", "cycled"),
    ),
    "bamboo_trainer.callbacks": ("Callback",),
    "bamboo_trainer.decisions": ("Committed", "Decision", "reduce_on_plateau", "frozen_for", "stop_when"),
    "bamboo_trainer.optimizers": ("Combined",),
    "bamboo_trainer.from_module": ("from_module",),
    "bamboo_trainer.data.config": ("dataset_from",),
    "bamboo_trainer.data.datasets": (
        "TensorDataset",
        "TextDataset",
        "NpzDataset",
        "Indexed",
        "HuggingFaceDataset",
        "Prefetched",
        "Mixture",
    ),
    "bamboo_trainer.data.token_file": ("Documents", "Tokens"),
    "bamboo_trainer.training": ("TrainingConfig",),
    "bamboo_trainer.loading": ("load_task",),
}
TASK = "Task"
DATA = "bamboo_trainer.data"
OTHERS = {"parameter_dtype", "boundary_dtype", "global_batch", "samples"}  # for the engine
HEAD = """\
# The Python API

<!-- Made by `make docs` from the docstrings and docs/generate_python_api.py; change those instead. -->

What a model's author imports; what is in `bamboo_trainer.data.…` can be imported from `bamboo_trainer.data`.
[models.md](models.md) has the rules for layers, datasets and optimizers beyond their signatures. All datasets have the
methods of [`Dataset`](#taskdataset). `help(NAME)` in Python, and this page on the site (`make site`), explain every
parameter. What is not on this page may change without notice.
"""


def page(whole: bool = False) -> str:
    """Return the page in Markdown. whole: the site's version, which has all docstrings in full."""
    shown = {name: names for name, names in SHOWN.items() if whole or not name.startswith(f"{DATA}.")}
    parts = [part for name, names in shown.items() for part in _module(name, names, whole)]
    return "\n".join([HEAD, *parts, *([] if whole else [_datasets()]), _models()])


def _datasets() -> str:
    """Return the section that only names the datasets, which data.md describes."""
    names = ", ".join(f"`{name}`" for module in SHOWN if module.startswith(f"{DATA}.") for name in SHOWN[module])
    return f"## {DATA}\n\n{names}: [data.md](data.md) describes them.\n"


def _models() -> str:
    """Return the section about the entrypoints that come with Bamboo."""
    names = ", ".join(f"`{name}`" for name in MODELS)
    about = (
        "`gpt` is a small byte-level GPT, `mlp` tells two spirals apart; [model-library.md](model-library.md) and"
        " [huggingface.md](huggingface.md) have the configs of the others."
    )
    text = f"Each has a function `build`, for a manifest's `task.entrypoint`: {names}. {about}"
    return f"## bamboo_trainer.models\n\n{text}\n"


def _module(name: str, names: tuple[str, ...], whole: bool) -> Iterator[str]:
    module = importlib.import_module(name)
    about = inspect.getdoc(module) or ""
    yield f"## {name}\n\n{about if whole else _first(about).rstrip()}\n"
    tree = ast.parse(inspect.getsource(module))
    for wanted in names:
        yield f"### {name.rpartition('.')[2]}.{wanted}\n"
        signature, text, *methods = _described(_found(module, tree, wanted))
        yield from [signature, text, *methods] if whole or wanted == TASK else [signature, _first(text)]


def _first(text: str) -> str:
    """Return the first paragraph of a docstring."""
    return text.partition("\n\n")[0].rstrip() + "\n"


def _found(module: ModuleType, tree: ast.Module, name: str) -> ast.stmt:
    for node in tree.body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return node
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                return node
    home = getattr(getattr(module, name, None), "__module__", module.__name__)  # of what the module only passes on
    if home == module.__name__:
        raise LookupError(f"{module.__name__} has no {name}")
    return _found(importlib.import_module(home), ast.parse(inspect.getsource(importlib.import_module(home))), name)


def _described(node: ast.stmt) -> Iterator[str]:
    """Yield a definition's signature, its docstring, and for a class each public method's docstring."""
    yield f"```python\n{_signature(node)}\n```\n"
    match node:
        case ast.ClassDef():
            yield _words(node)
            for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                if _public(method.name) and (text := ast.get_docstring(method)):
                    yield f"`{method.name}`: {text}\n"
        case ast.FunctionDef():
            yield _words(node)
        case _:
            yield ""


def _signature(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef(name=name, args=arguments, returns=returns):
            result = f" -> {ast.unparse(returns)}" if returns else ""
            return f"def {name}({ast.unparse(arguments)}){result}"
        case ast.ClassDef(name=name, bases=bases, body=body, decorator_list=decorators):
            parents = f"({', '.join(map(ast.unparse, bases))})" if bases else ""
            fields = [ast.unparse(part) for part in body if isinstance(part, ast.AnnAssign)]
            of_all = () if name == "Dataset" else ("__len__", "batch")
            functions = [part for part in body if isinstance(part, ast.FunctionDef) and _public(part.name)]
            methods = [_signature(part) for part in functions if part.name not in of_all]
            above = "".join(f"@{ast.unparse(decorator)}\n" for decorator in decorators)
            above = above.replace("frozen=True, slots=True, ", "")  # which says nothing of how it is called
            return above + "\n    ".join([f"class {name}{parents}:", *fields, *methods])
    return ast.unparse(node)


def _public(name: str) -> bool:
    return (not name.startswith("_") or name in ("__init__", "__len__")) and name not in OTHERS


def _words(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the docstring as Markdown: lines that begin with a parameter ("name: ...") become a list."""
    lines: list[str] = []
    for line in (ast.get_docstring(node) or "").splitlines():
        head, colon, _ = line.partition(": ")
        if colon and all(name.isidentifier() for name in head.split(", ")):
            lines.append(f"- `{head.replace(', ', '`, `')}`{line[len(head) :]}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
