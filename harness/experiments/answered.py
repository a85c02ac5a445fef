"""What moves between a process that prefills and one that decodes."""

from dataclasses import dataclass


@dataclass
class Answered:
    """What became of one prompt.

    Attributes:
        length: tokens of the prompt.
        prefill_s: wall clock of its prefill, beside the submission.
        nbytes: keys and values that were moved.
        transfer_s: wall clock from their header's arrival until they stand in the other caches.
        tokens: new ones, the first of them from the prefill.
    """

    length: int
    prefill_s: float
    nbytes: int = 0
    transfer_s: float = 0.0
    tokens: int = 0
