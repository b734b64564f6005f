"""Files on disk or in an object store: each call ends within a time limit, with errors as one sentence."""
