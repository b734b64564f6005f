"""The command line's access to a cluster's API: kubeconfig, credentials and a client."""
