"""A BambooJob's manifest (types of its spec, parser, rules, warnings, edits, pod templates) and its status."""
