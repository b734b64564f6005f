"""What the command line needs of a cluster's API: kubeconfig, credentials, and a client."""
