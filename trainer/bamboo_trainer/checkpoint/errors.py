"""What an export may end with."""


class ExportError(Exception):
    """The output cannot be written; the text is a sentence."""
