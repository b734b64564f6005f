"""The end of a job that has done all its steps."""
