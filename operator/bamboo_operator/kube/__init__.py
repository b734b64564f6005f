"""The API server: client and credentials, objects as plain mappings, and the Lease that lets only one operator work."""
