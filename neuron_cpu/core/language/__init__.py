"""The kernel language of SDK 2.21 as its users see it (``neuronxcc.nki``)."""
