"""Generate docs/cli.md from the commands' own help (`make docs`). A test fails if the committed page is stale.

The committed page only names each command's options; the site's page has each command's help without examples.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from bamboo.cli.commands import app

COMMANDS = typer.main.get_group(app)
PAGE = Path(__file__).parent / "cli.md"
WIDTH = "100"

HERE = (
    "init",
    "run",
    "validate",
    "plan",
    "simulate",
    "profile",
    "checkpoints",
    "export",
    "tokenize",
    "history",
)
CLUSTER = (
    "submit",
    "list",
    "status",
    "events",
    "logs",
    "suspend",
    "resume",
    "delete",
    "preempt",
    "page",
    "doctor",
)

HEAD = """\
# The command line

<!-- Made by `make docs` from the commands' help and docs/generate_cli.py; change those instead. -->

`bamboo` runs and checks jobs on this machine, and manages jobs on a cluster.

| Exit code | What |
| --- | --- |
| 0 | Done; for a command that watches a job: it is complete, or the user left the view with `q` |
| 1 | The job failed, or the command could not do what it was asked |
| 2 | A wrong flag, manifest or kubeconfig; nothing was done |
| 3 | The job failed and could not be recovered without a checkpoint |
| 130 | Stopped by Ctrl-C |

Errors are sentences on standard error that begin with `bamboo: `; those about flags begin with the usage. `bamboo COMMAND --help`, with examples, and this page on the site (`make site`) explain the options that this page names. `--quiet` prints only the result and errors; `--namespace`, `--context` and `--kubeconfig` choose the cluster. `bamboo --install-completion` lets bash, zsh or fish complete commands, flags and names of jobs.

## Reaching the cluster

As kubectl does: `--kubeconfig`, else the files of `$KUBECONFIG`, else `~/.kube/config`, else, inside a pod, its
ServiceAccount. Proxies (`proxy-url`, or `HTTPS_PROXY` and `NO_PROXY`) and credential plugins (`exec`) are supported;
[install.md](install.md#4-the-command-line) has the differences from kubectl.

Rights that a person needs, in the job's namespace:

| Command | Rights |
| --- | --- |
| `list`, `status` | get, list on `bamboojobs.bamboo.dev`; for workers, events and zones list on `pods` and `events`, and get on `nodes` |
| `events`, `logs` | also list on `pods` and `events`; get on `pods/log` |
| `submit`, `suspend`, `resume` | also patch (`submit`: and create) on `bamboojobs.bamboo.dev` |
| `delete` | also delete on `bamboojobs.bamboo.dev` |
| `preempt` | also delete on `pods` |
| `page` | get on the job; in the operator's namespace get and create on `pods/portforward` and create on `serviceaccounts/token`; list on `pods` in all namespaces, or with `--operator-namespace` in that one |
| `doctor` | get on the job; what may not be looked at is named: the operator's pods and Lease, nodes, quotas, the CRD |

## What a drill does

| Flags | What is done | What the operator sees |
| --- | --- | --- |
| `--notice` (default) | The pod is deleted with its grace period | A notice; the worker leaves between two steps |
| `--kill` | The pod is deleted with a grace period of 0 | A loss; other workers take the stages over at once |

A drill asks for confirmation, or needs `--yes`, if the job is not fully protected. For a whole node write its cloud's mark on it:
`kubectl taint node NODE aws-node-termination-handler/spot-itn=drill:NoSchedule`, and remove it afterwards.

## Editing a job

`bamboo submit FILE` refuses a job that exists. With `--apply` the manifest is merged into it by server-side apply, as
field manager `bamboo`. A field that another manager has set, such as `spec.topology.pipelines` by `kubectl edit`, is
reported as a conflict; `--force` takes it over.
"""  # noqa: E501


SHARED = ("--help", "--quiet", "--namespace", "--context", "--kubeconfig")
# An argument or option that at least this number of commands explain in the same words is explained once, above them.
SHARED_BY = 2
CLUSTERS = "Those of the cluster are `--namespace`, `--context` and `--kubeconfig`."
OF_ALL = ("--namespace", "--context", "--kubeconfig")  # the commands on a cluster
ENTRY = re.compile(r"^  \S")


def page(whole: bool = False) -> str:
    """Return the page in Markdown. whole: the site's version, which has each command's help, not only option names."""
    sections = {"Commands on a cluster": commands(CLUSTER), "Commands on this machine": commands(HERE)}
    texts = {words: help_of(*words) for names in sections.values() for words in names}
    if not whole:
        return "\n".join([HEAD, *(part for title, names in sections.items() for part in brief(title, names, texts))])
    shared = explained_once(texts.values())
    rows = [f"| `{names}` | {what} |" for names, what in shared.items()]
    parts = [
        HEAD,
        "## Options of several commands\n",
        f"{CLUSTERS}\n",
        "\n".join(["| Option | What |", "| --- | --- |", *rows, ""]),
    ]
    for title, names in sections.items():
        everywhere = frozenset.intersection(*(frozenset(explained_above(texts[words], shared)) for words in names))
        parts.append(f"## {title}\n")
        parts += [f"Options of each: {', '.join(listed(sorted(everywhere)))}.\n"] if everywhere else []
        helps = {words: own_help(texts[words], shared, everywhere) for words in names}
        parts += [f"### bamboo {' '.join(words)}\n\n```\n{text}\n```\n" for words, text in helps.items()]
    return "\n".join(parts)


def brief(title: str, names: Sequence[tuple[str, ...]], texts: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """Yield a section's title, then the usage, purpose and option names (except SHARED) of each command."""
    yield f"## {title}\n"
    for words in names:
        usage, about = own_help(texts[words], {}, ()).split("\n\n")[:2]
        options = [short(cells(entry)[0]) for entry in entries(texts[words], "Options")]
        own = ", ".join(f"`{name.partition(' <')[0]}`" for name in options if name not in SHARED)
        named = f" Options: {own}." if own else ""
        yield f"### bamboo {' '.join(words)}\n\n`{usage}`: {' '.join(about.split())}{named}\n"


def commands(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each command's words after `bamboo`, with a group's commands in place of the group."""
    found: list[tuple[str, ...]] = []
    for name in names:
        command = COMMANDS.commands[name]
        found += [(name, inner) for inner in command.commands] if isinstance(command, TyperGroup) else [(name,)]
    return found


def explained_once(texts: Iterable[str]) -> dict[str, str]:
    """Return, by name, the help of the arguments and options that several commands explain in the same words."""
    counts = Counter(
        cells(lines) for text in texts for title in ("Arguments", "Options") for lines in entries(text, title)
    )
    shared: dict[str, str] = {}
    for (names, what), count in counts.most_common():
        if count >= SHARED_BY:
            shared.setdefault(names, what)
    return shared


def entries(text: str, title: str) -> list[list[str]]:
    """Return the lines about each argument or option in a command's help. title: Arguments or Options."""
    found: list[list[str]] = []
    for line in text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines():
        if ENTRY.match(line):
            found.append([])
        found[-1].append(line)
    return found


def cells(lines: Sequence[str]) -> tuple[str, str]:
    """Return an entry's names and its help text on one line, both with | escaped for a Markdown table."""
    names, _, begin = lines[0].strip().partition("  ")
    text = " ".join([begin, *lines[1:]]).split()
    return names.replace("|", "\\|"), " ".join(text).replace("|", "\\|")


def own_help(text: str, shared: Mapping[str, str], everywhere: Collection[str]) -> str:
    """Return a command's help without its examples, which are in the guides, and without shared arguments. Only name
    shared options; leave out the options in `everywhere`, which all commands of the section share.
    """
    paragraphs = text.partition("\nArguments:\n")[0].partition("\nOptions:\n")[0].rstrip().split("\n\n")
    about = "\n\n".join(one for one in paragraphs if not one.lstrip().startswith("Example:"))
    lines = [about.removeprefix("Usage: ").replace(" [OPTIONS]", "", 1)]
    for title in ("Arguments", "Options"):
        own = [entry for entry in entries(text, title) if shared.get(cells(entry)[0]) != cells(entry)[1]]
        lines += ["", f"{title}:", *(line for entry in own for line in entry)] if own else []
    shown = listed([name for name in explained_above(text, shared) if name not in everywhere])
    return "\n".join([*lines, *(["", f"Also {', '.join(shown)}."] if shown else [])])


def explained_above(text: str, shared: Mapping[str, str]) -> list[str]:
    """Return the names of a command's options whose help is in `shared`, except --help."""
    names = [cells(entry)[0] for entry in entries(text, "Options") if shared.get(cells(entry)[0]) == cells(entry)[1]]
    return [short(name) for name in names if not name.startswith("-h")]


def listed(names: Sequence[str]) -> list[str]:
    """Return the options' names; if they include all three cluster options, combine these in one last entry."""
    if not set(OF_ALL) <= set(names):
        return list(names)
    return [*(name for name in names if name not in OF_ALL), "those of the cluster"]


def short(names: str) -> str:
    """Return the last of an option's names, with its listed values (`<...>`) or its negation (`/ --no-...`), if any."""
    flag, _, value = names.replace("\\|", "|").split(", ")[-1].partition(" ")
    return f"{flag} {value}" if value.startswith(("<", "/")) else flag


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], prog_name="bamboo", env={"COLUMNS": WIDTH})
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.strip("\n").splitlines())


if __name__ == "__main__":
    PAGE.write_text(page())
