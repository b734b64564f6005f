"""Inspection, preparation and calls of the user's task, with errors that name the part at fault."""
