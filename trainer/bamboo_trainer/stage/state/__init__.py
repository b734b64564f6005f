"""What a stage remembers from step to step: parameters, optimizer, numbers; as it is held and as it travels."""
