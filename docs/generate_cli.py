"""Writes docs/cli.md from the commands' own help: `make docs`. A test fails if the committed page is stale."""

from pathlib import Path

from typer.testing import CliRunner

from bamboo.cli.commands import app

PAGE = Path(__file__).parent / "cli.md"
WIDTH = "100"

HERE = (
    "run",
    "validate",
    "plan",
    "simulate",
    "compare",
    "research",
    "profile",
    "trace",
    "traces",
    "checkpoints",
    "export",
    "data",
    "history",
    "completion",
    "version",
)
CLUSTER = (
    "submit",
    "list",
    "status",
    "top",
    "events",
    "logs",
    "rollout",
    "suspend",
    "resume",
    "delete",
    "preempt",
    "page",
)

HEAD = """\
# The command line

<!-- Made by `make docs` from the commands' help and docs/generate_cli.py; change those instead. -->

`bamboo` runs and checks jobs on this machine, and manages jobs on a cluster. The commands for a cluster are also
available as `kubectl bamboo ...`: kubectl finds the program `kubectl-bamboo`, which comes with the package `bamboo-spot`.

| Exit code | What |
| --- | --- |
| 0 | Done; for a command that watches a job: the job is complete, or the user left the view with `q` |
| 1 | The job failed, or the command could not do what it was asked: no such job, no permission, no cluster, timeout |
| 2 | A wrong flag, manifest or kubeconfig; nothing was done |
| 3 | The job failed and could not be recovered without a checkpoint |
| 130 | Stopped by Ctrl-C |

Errors are sentences on standard error that begin with `bamboo: `.

## Reaching the cluster

As kubectl does: `--kubeconfig`, else the files of `$KUBECONFIG`, else `~/.kube/config`, else, inside a pod, its
ServiceAccount. `--context` chooses from them, `--namespace` overrides the context's namespace. Certificates, tokens,
token files, users with passwords, impersonation, proxies (`proxy-url`, or `HTTPS_PROXY` and `NO_PROXY`) and credential plugins (`exec`, as EKS, GKE and
AKS use) are supported; a plugin is run again when its token expires or is refused. The old `auth-provider` is not supported.

Rights that a person needs, in the job's namespace:

| Command | Rights |
| --- | --- |
| `list`, `status`, `top` | get, list on `bamboojobs.bamboo.dev`; without list on `pods` and `events`, and get on `nodes`, workers, events and zones are not shown, and the output says so |
| `events`, `logs` | also list on `pods` and `events`; get on `pods/log` |
| `submit`, `suspend`, `resume`, `rollout` | also patch (`submit`: and create) on `bamboojobs.bamboo.dev` |
| `delete` | also delete on `bamboojobs.bamboo.dev` |
| `preempt` | also delete on `pods`; with `--node` get and patch on `nodes` |
| `page` | get on the job; in the operator's namespace get and create on `pods/portforward` and create on `serviceaccounts/token`; list on `pods` in all namespaces, or with `--operator-namespace` in that one |

## What a drill does

`bamboo preempt` does to a job what a cloud will do to it some day, so that you can see how the job reacts.

| Flags | What is done | What the operator sees |
| --- | --- | --- |
| `--notice` (default) | The pod is deleted with its grace period | A notice; the worker leaves between two steps |
| `--kill` | The pod is deleted with a grace period of 0 | A loss; other workers take the stages over at once |
| `--node` | The node gets the taint that its cloud writes before it takes a node back | A notice to all workers on the node |
| `--node --kill` | All of the job's pods on the node are deleted with a grace period of 0 | Several losses at once |

It then waits until the stages are taken over and every stage has a second copy again, and prints how long each took.
The taint is removed at the end, also after Ctrl-C; its value is `bamboo-drill`, so that a taint that was left behind,
because your computer crashed, can be told from a cloud's. A drill asks for confirmation, or needs `--yes`, if the job is
not fully protected, if neighbouring stages would be lost at once, or if workers of other jobs are on the node.

## Editing a job

`bamboo submit FILE` refuses a job that exists. With `--apply` the manifest is merged into the existing job by
server-side apply, as field manager `bamboo`: fields in the manifest are set, fields that an earlier manifest had and
this one does not have are removed, and all others stay. A field that another manager has set, such as
`spec.topology.pipelines` by `kubectl scale`, is reported as a conflict; `--force` takes it over.
"""  # noqa: E501


def page() -> str:
    parts = [HEAD]
    for title, names in (("Commands on a cluster", CLUSTER), ("Commands on this machine", HERE)):
        parts.append(f"## {title}\n")
        parts += [f"### bamboo {name}\n\n```\n{help_of(name)}\n```\n" for name in names]
        if "trace" in names:
            inner = (
                ("trace", "summary"),
                ("traces", "show"),
                ("traces", "convert"),
                ("traces", "generate"),
                ("checkpoints", "list"),
                ("checkpoints", "verify"),
                ("checkpoints", "prune"),
                ("data", "tokenize"),
                ("data", "show"),
            )
            parts += [f"### bamboo {' '.join(words)}\n\n```\n{help_of(*words)}\n```\n" for words in inner]
    return "\n".join(parts)


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], prog_name="bamboo", env={"COLUMNS": WIDTH})
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.strip("\n").splitlines())


if __name__ == "__main__":
    PAGE.write_text(page())
