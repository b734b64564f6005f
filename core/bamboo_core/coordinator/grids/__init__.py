"""The choice of a job's grid (stages, pipelines and schedule) for its workers, and of the number of workers to hold."""
