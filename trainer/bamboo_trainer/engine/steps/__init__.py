"""The work on a step: a cell's instructions, what each waits for and does, and rehearsals."""
