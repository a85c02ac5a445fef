"""Figures, tables and traces of a schedule, which show a kernel's bound."""
