"""Errors of stores. Each text is one sentence for a person, without credentials."""


class StorageError(Exception):
    """Error of a store that cannot do what was asked, or whose content is unusable."""


class StoreUnavailable(StorageError):
    """Error of a store that is unreachable, too slow, full, or denies permission."""
