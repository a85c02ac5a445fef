"""The compiler's cache, as far as Transformers NeuronX asks for it: nothing is kept here.

Source of names: aws-neuron/transformers-neuronx 1ade6d7 (compiler.py).
"""

import os


class CacheUrl:
    """Where compiled graphs are kept."""

    def __init__(self, url: str) -> None:
        self.url = url

    @classmethod
    def get_cache_url(cls) -> "CacheUrl":
        """The place that the environment names."""
        return cls(os.environ.get("NEURON_COMPILE_CACHE_URL", "/var/tmp/neuron-compile-cache"))


def create_compile_cache(url: CacheUrl) -> CacheUrl:
    """A cache without files to download: compiling for a CPU takes no longer than that."""
    return url
