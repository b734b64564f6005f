"""The BambooJob's status: its facts, condition rules, costs, events, and its writer."""
