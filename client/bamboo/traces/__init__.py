"""Traces (recordings) of spot nodes: when nodes came and went, their zones, notices and prices. Pure except `files`."""
