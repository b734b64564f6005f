"""Files at a path or a URL, in calls that always return and say in one sentence what went wrong."""
