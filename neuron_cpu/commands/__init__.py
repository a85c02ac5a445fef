"""The commands of `python -m neuron_cpu`, one file each: HELP, `declare` (options) and `run`."""
