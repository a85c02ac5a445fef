"""Submissions in processes of their own: the driver's end of the line, and theirs."""
