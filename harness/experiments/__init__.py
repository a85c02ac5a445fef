"""What works and is a demonstration: docs/experiments.md says of what."""
