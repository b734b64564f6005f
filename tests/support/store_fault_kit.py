"""Stores that fail."""


def states(store):
    return [(one.attempt.step, one.state.value) for one in store.list()]
