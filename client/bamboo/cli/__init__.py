"""The `bamboo` command line: commands and flags. The other packages, imported late, do the work."""
