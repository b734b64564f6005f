"""One module for each published strategy: what it does when nodes come and go. Pure."""
