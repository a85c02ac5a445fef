"""Memory that a program needs at its worst point."""

from neuron_cpu.core.check.capacity import live_spans, psum_peak, sbuf_peak


def sbuf_high_water(program):
    """Most SBUF bytes per partition that are live at once."""
    return sbuf_peak(program, live_spans(program))[0]


def psum_high_water(program):
    """Most PSUM banks that are live at once."""
    return psum_peak(program, live_spans(program))[0]
