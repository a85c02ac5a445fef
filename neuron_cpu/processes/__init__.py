"""Processes of other people's code: how they start, what they may use, how they end."""
