"""A kernel in any model of transformers: how it is called, and what runs beside it."""
