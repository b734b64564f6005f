"""The forms in which commands print things. Imported at every start: nothing heavy here."""

from enum import StrEnum


class OutputFormat(StrEnum):
    """The forms in which things are printed."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
