"""Commands on a Kubernetes cluster: submit, change, show and follow jobs, check the cluster, preempt workers."""
