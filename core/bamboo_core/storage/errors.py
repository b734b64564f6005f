"""What can go wrong with a store. Each text is one sentence for a person, and holds no credential."""


class StorageError(Exception):
    """What was asked of a store cannot be done, or what is in it cannot be used."""


class StoreUnavailable(StorageError):
    """The store does not do what it is asked: unreachable, too slow, full, or it denies permission."""
