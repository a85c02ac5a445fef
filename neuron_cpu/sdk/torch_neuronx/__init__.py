"""Stand-in for the subset of torch_neuronx that Llama model files and the contest driver use."""

# The version of SDK 2.21, whose interfaces the stand-in follows.
__version__ = "2.5.1.2.4.0"
