"""Workers whose pods are out of date, and how they are replaced while the job trains."""
