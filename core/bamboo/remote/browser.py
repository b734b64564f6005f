"""Opens a secret URL in the user's browser. Not by an argument: every user of this machine can read those."""

import asyncio
import contextlib
import html
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

READ_SECONDS = 60.0  # for the browser to start and read the file

LEADING = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>Bamboo</title>
<a href="{url}">The job's page</a>
"""


async def show(url: str, seconds: float = READ_SECONDS) -> bool:
    """False if there is no browser; else when the file that leads to the URL is gone again."""
    with leading_to(url) as path:
        if not await asyncio.to_thread(webbrowser.open, path.as_uri()):
            return False
        await asyncio.sleep(seconds)
    return True


@contextlib.contextmanager
def leading_to(url: str) -> Iterator[Path]:
    """A page that leads there, which nobody else can read, for as long as the context lasts."""
    with tempfile.NamedTemporaryFile("w", prefix="bamboo-", suffix=".html") as file:  # with mode 0600
        file.write(LEADING.format(url=html.escape(url)))
        file.flush()
        yield Path(file.name)
