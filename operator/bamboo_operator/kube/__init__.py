"""The API server: client and credentials, objects as plain mappings, and the Lease by which one operator works."""
