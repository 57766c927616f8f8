"""The operations console: a terminal program in a process of its own. It sees what the head says, by `transport`, and nothing of the engine."""
