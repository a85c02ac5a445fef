"""The device's instructions: rules, semantics and cost of each, by engine."""
