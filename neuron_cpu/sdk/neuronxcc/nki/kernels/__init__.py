"""The SDK's own open kernels: left out, and the import says so."""

raise ModuleNotFoundError(
    "neuronxcc.nki.kernels holds the SDK's own kernels (flash_fwd and others), expected kernels of "
    "your own: the stand-in neuron_cpu leaves them out; their sources are public (aws-neuron/"
    "nki-samples, src/nki_samples/reference): put a copy beside your file and import that.",
    name="neuronxcc.nki.kernels",
)
