"""The laboratory beside the product: measured times, fits to them, and what pages show in numbers.

It reads the product, which imports nothing of it and is told what was found as data: bands, DMA
profiles and evidence (json files of neuron_cpu/core).
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA, NOTES = ROOT / "lab" / "data", ROOT / "lab" / "docs"
