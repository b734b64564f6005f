"""Names on the Hugging Face Hub, given where a folder or a file of this machine is expected."""

import re
from pathlib import Path
from typing import Final

_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # gpt2, openai-community/gpt2


def looks_like_an_id(given: str | Path) -> bool:
    """Return whether the text could be a name on the Hub."""
    return bool(_ID.fullmatch(str(given))) and Path(given).suffix != ".json"


def nothing_there(given: str | Path, save: str, *, what: str = "folder") -> str:
    """Return a message for a path where nothing is. save: the Python that saves it there, with ID for its name on the
    Hub and FOLDER for the folder; included if the path looks like such a name.
    """
    sentence = f"there is no {what} {given}"
    if not looks_like_an_id(given):
        return sentence
    folder = str(given).rpartition("/")[2]
    shown = save.replace("ID", repr(str(given))).replace("FOLDER", repr(folder))
    return (
        f"{sentence}; it looks like a name on the Hugging Face Hub, from which this is not fetched: save it to a "
        f"folder where there is a network, with {shown}, and name the {what} that this writes"
    )
