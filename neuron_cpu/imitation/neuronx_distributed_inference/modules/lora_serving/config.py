"""The configuration of an application with adapters (NxDI `modules/lora_serving/config.py`)."""

from typing import Any, Dict, List, Optional, Union

from ...contract import contract

Paths = Union[Dict[str, str], List[str], None]


class LoraServingConfig:
    """Low-rank adapters that stay on the device; each row of a batch chooses one.

    `lora_ckpt_paths` is a dict of id and folder, or a list of "id : folder". `max_lora_rank` and
    `target_modules` grow where a checkpoint asks for more (`adapters.resolve`).
    """

    def __init__(
        self,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_loras_on_cpu: int = 2,
        target_modules: Union[List[str], str, None] = None,
        lora_bias: str = "none",
        lora_ckpt_paths: Paths = None,
        lora_memory_transpose: bool = True,
        lora_shard_linear_layer: bool = False,
    ) -> None:
        if max_lora_rank <= 0:
            raise ValueError(f"max_lora_rank is {max_lora_rank}, expected at least 1.")
        self.max_loras = max_loras
        self.max_lora_rank = max_lora_rank
        self.max_loras_on_cpu = max_loras_on_cpu  # nothing is swapped, here as in NxDI
        self.target_modules = target_modules
        self.lora_bias = lora_bias
        self.lora_ckpt_paths = _by_id(lora_ckpt_paths)
        if contract().loads_adapters:
            self.lora_memory_transpose = lora_memory_transpose
            self.lora_shard_linear_layer = lora_shard_linear_layer

    @property
    def indices(self) -> Dict[str, int]:
        """Id -> row of the adapters' weights. Row 0 stays zero: it is the base model."""
        return {"0": 0} | {name: row for row, name in enumerate(self.lora_ckpt_paths, 1)}


def _by_id(paths: Paths) -> Dict[str, str]:
    """Id -> folder, in the order given; ValueError for an id that occurs twice."""
    if paths is None or isinstance(paths, dict):
        return dict(paths or {})
    found: Dict[str, str] = {}
    for entry in paths:
        name, _, path = (part.strip() for part in entry.partition(":"))
        if name in found or not path:
            raise ValueError(
                f"lora_ckpt_paths has {entry!r}, expected 'id : folder' with an id of its "
                "own; mend it."
            )
        found[name] = path
    return found


def as_lora_config(value: Optional[Union[LoraServingConfig, Dict[str, Any]]]) -> Any:
    """The object for a dict, the form of saved configurations and command lines."""
    return LoraServingConfig(**value) if isinstance(value, dict) else value
