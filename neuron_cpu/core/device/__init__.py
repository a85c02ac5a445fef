"""The simulated device: constants and their sources, number formats, refusals."""
