"""The command line: commands and flags. The packages `local` and `remote`, imported late, do the work."""
