"""Access to a cluster's API server for the command line and the operator: kubeconfig, credentials, and a client."""
