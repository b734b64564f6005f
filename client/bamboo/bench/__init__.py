"""`bamboo bench`: what is measured on a machine, how, and the report of it."""
