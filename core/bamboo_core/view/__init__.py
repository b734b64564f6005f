"""The view of a job for display, made from a BambooJob or from the status of a coordinator in this process."""
