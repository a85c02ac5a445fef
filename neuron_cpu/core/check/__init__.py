"""Refusals of compiler and hardware: rules over a whole Program and its source."""
