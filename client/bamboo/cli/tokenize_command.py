"""`bamboo tokenize`: its flags and --help. The trainer does the work."""

from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.output_files import check_is_path
from bamboo_core.names import DocumentUnit

app = typer.Typer(rich_markup_mode=None)


@app.command()
def tokenize(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Text files, .jsonl files, or folders.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File to write, NAME.tokens; with --shard a folder.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="FILE", help="A tokenizer.json of the library tokenizers; bytes: each byte is one.")
    ] = "bytes",
    end: Annotated[str, typer.Option(metavar="TOKEN", help="The tokenizer's token to write after each document.")] = "",
    field: Annotated[str, typer.Option(metavar="NAME", help="Which field of a .jsonl line is the text.")] = "text",
    document: Annotated[
        DocumentUnit,
        typer.Option(
            help="What of a text file is a document: all of it, or each line that is not blank. "
            "Of a .jsonl file it is always a line."
        ),
    ] = DocumentUnit.FILE,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Which files of folders are taken. May be given several times.",
            show_default="*.txt, *.md, *.jsonl, *.jsonl.gz",
        ),
    ] = None,
    shard: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Begin a new file after so many tokens.", show_default="one file"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file at PATH.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False,
) -> None:
    """Tokenize texts into files, for data of kind "tokens".

    Example: bamboo tokenize books/ -o books.tokens --tokenizer tokenizer.json --end '<|endoftext|>'
    """
    from bamboo.local.trainer_calls.trainer_process import run_trainer

    check_is_path("--output", output, "a folder" if shard is not None else "a file")
    code = run_trainer(
        "this command",
        "tokenize",
        *map(str, texts),
        tokenizer=tokenizer,
        end=end,
        field=field,
        document=document,
        output=output,
        pattern=pattern,
        shard=shard,
        force=force,
        quiet=quiet,
    )
    raise typer.Exit(code)
