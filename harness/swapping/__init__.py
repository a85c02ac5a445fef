"""A kernel in any model of transformers: the forms of its call, and its process."""
