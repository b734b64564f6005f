"""Traces of spot nodes: when nodes came and went, with zone and notice, and what they cost. Pure but for `files`."""
