"""What happened to the nodes that workers ran on, as a trace that `bamboo simulate` replays."""
