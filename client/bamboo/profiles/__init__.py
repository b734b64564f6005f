"""What a model costs on a machine: seconds and bytes of each layer, network, storage, start. Pure but for `files`."""
