"""The command line: commands and flags. The work is in the packages `local` and `remote`, which are imported late."""
