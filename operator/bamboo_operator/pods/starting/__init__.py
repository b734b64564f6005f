"""Workers that have not joined yet: what holds them back, for how long, and when the operator requests others."""
