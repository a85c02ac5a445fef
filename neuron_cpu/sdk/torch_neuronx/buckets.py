"""The way in which a sub-model of several buckets chooses one, up to NxD 0.14."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BucketModelConfig:
    """NxDI's description of the buckets of a sub-model.

    Attributes:
        bucket_kernel: makes the scripted function from inputs and constants to inputs and bucket.
        func_kwargs: of the module of each bucket.
    """

    bucket_kernel: Callable[[], Any]
    bucket_kernel_constant_args: Any = ()
    shared_state_buffer: Any = None
    func_kwargs: list[dict[str, Any]] | None = None
    shared_state_buffer_preprocessor: Any = None
    example_inputs: Any = field(default=None, repr=False)

    @property
    def bucket_degree(self) -> int:
        """The number of buckets."""
        return len(self.example_inputs or self.func_kwargs or ())

    def store_example_inputs(self, example_inputs: Any) -> None:
        self.example_inputs = example_inputs

    def get_func_kwargs_for_bucket_rank(self, bucket_rank: int) -> dict[str, Any]:
        """A copy of the bucket's own keywords; empty where it has none."""
        if isinstance(self.func_kwargs, dict):
            return dict(self.func_kwargs)
        return dict(self.func_kwargs[bucket_rank]) if self.func_kwargs else {}
