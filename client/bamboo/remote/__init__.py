"""Commands on a cluster: show a job, change it, follow it, and take its workers away as a drill."""
