"""Model files beside llama.py: its extensions, today's language, and the contest of 2026.

extended.py   the Llama that the driver takes where llama.py does not cover a setting or a model
today.py      the kernels of llama.py in the language of SDK 2.29 and later
step.py       a decode step as one kernel of that language
qwen3_moe.py  Qwen3 with experts, a submission of its own
"""
