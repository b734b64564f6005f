"""Published ways to train on nodes that are taken away, under one set of assumptions. Pure: docs/simulator.md."""
