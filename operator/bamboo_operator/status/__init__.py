"""The BambooJob's status: its facts, condition rules, budget sentences, events, and its writer."""
