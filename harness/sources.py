"""Where a figure comes from. Figures of different sources are never mixed without saying so."""

from enum import Enum


class Source(str, Enum):
    """The source of a time or a rate, in the words that reports show."""

    SIMULATOR = "simulator"  # wall clock of the CPU simulator, no device time
    DEVICE = "device"  # wall clock on a NeuronCore
    COST_MODEL = "cost model"  # estimated by neuron_cpu
    PUBLISHED = "published"  # the contest's own figures
    GIVEN = "given"  # by the command line

    __str__ = str.__str__

    @property
    def label(self) -> str:
        """The meaning of a wall-clock time of this source."""
        return _LABELS.get(self, self.value)


_LABELS = {
    Source.SIMULATOR: "wall clock of the CPU simulator, not a device time",
    Source.DEVICE: "measured on the device",
}
