"""How long a Program would take: cost of each instruction, dependences, schedule."""
