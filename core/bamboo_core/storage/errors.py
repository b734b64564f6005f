"""Errors of stores. Each text is one sentence for a person, without credentials."""


class StorageError(Exception):
    """A store cannot do what was asked, or its content is unusable."""


class StoreUnavailable(StorageError):
    """The store is unreachable, too slow, full, or denies permission."""
