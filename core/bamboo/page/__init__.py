"""The job page: what a job's shell keeps for it, the document it is made of, and how it is served."""
