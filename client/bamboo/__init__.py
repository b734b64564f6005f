"""What people run: the command line, local jobs, jobs on a cluster, simulations and planning ahead."""
