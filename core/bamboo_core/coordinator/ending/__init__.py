"""The end of a job that has done all its steps: when it is reached, and how the final weights get into their folder."""
