"""What the commands on a cluster do: show a job, change it, follow it, and take its workers away as a drill."""
