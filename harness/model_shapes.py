"""Public Llama configurations by name, for work that needs shapes and no weights.

model_shapes.json has of each config.json the fields that shapes and NxDI's config classes read.
"""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("model_shapes.json")
MODEL_SHAPES: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
