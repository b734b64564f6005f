"""The work on a step: a cell's instructions, their inputs and effects, and rehearsals."""
