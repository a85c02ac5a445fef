"""Names of the SDK's closed kernels: model files import them; none of them can run here."""

from __future__ import annotations

from typing import Any, Callable, NoReturn


def placeholder(name: str) -> Callable[..., NoReturn]:
    """A callable with the kernel's name that refuses to run."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} is a closed kernel of the Neuron SDK and does not exist in neuron_cpu; "
            "switch off the NeuronConfig option that asks for it, or write a kernel of your own."
        )

    refuse.__name__ = name
    return refuse
