"""Published strategies for training on nodes that are taken away, under one set of assumptions: docs/benchmarks.md."""
