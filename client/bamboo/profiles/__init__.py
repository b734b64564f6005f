"""Profiles of a model on a machine: seconds and bytes of each layer, network, storage, start. Pure except `files`."""
