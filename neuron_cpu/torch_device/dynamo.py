"""Teaches Dynamo, PyTorch's tracer of Python, what kernels and tensors of the device are.

A kernel's call becomes one node of the graph. Dynamo reads the call's constants while it traces, as
a device's compiler does; a kernel's Python is never traced by Dynamo.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from neuron_cpu.core.current.kernel import Kernel as TodaysKernel
from neuron_cpu.core.language.kernel import Kernel
from neuron_cpu.core.language.specialisation import Hole, filled

from .tensor import NeuronTensor


@functools.cache
def teach() -> None:
    """Enter the classes into Dynamo's table of types, once."""
    from torch._dynamo import trace_rules
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    class KernelVariable(VariableTracker):
        """A kernel in traced code."""

        def __init__(self, kernel: Kernel, **options: Any) -> None:
            super().__init__(**options)
            self.kernel = kernel

        def python_type(self) -> type:
            return type(self.kernel)

        def as_python_constant(self) -> Kernel:
            return self.kernel

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
            proxies: list[Any] = []

            def plain(value: Any) -> Any:
                """The argument with a hole for each tensor."""
                value = value.realize()
                if isinstance(value, TensorVariable):
                    proxies.append(value.as_proxy())
                    return Hole(len(proxies) - 1)
                if isinstance(value, SymNodeVariable):
                    return value.evaluate_expr()
                if isinstance(value, BaseListVariable):
                    items = [plain(one) for one in value.items]
                    kind = value.python_type()
                    return kind(*items) if hasattr(kind, "_fields") else kind(items)
                if isinstance(value, ConstDictVariable):
                    return {
                        plain(getattr(name, "vt", name)): plain(one)
                        for name, one in value.items.items()
                    }
                if value.is_python_constant():
                    return value.as_python_constant()
                return value.value  # an object of the user's: a constant of the graph

            given = [plain(one) for one in args]
            node = Call(self.kernel, given, {name: plain(one) for name, one in kwargs.items()})
            proxy = tx.output.create_proxy("call_function", node, tuple(proxies), {})
            return wrap_fx_proxy(tx, proxy)

        def mp_subscript_impl(self, tx: Any, key: Any) -> VariableTracker:
            return KernelVariable(self.kernel[key.as_python_constant()])

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
            if name == "__getitem__":
                return self.mp_subscript_impl(tx, args[0])
            return super().call_method(tx, name, args, kwargs)

        def var_getattr(self, tx: Any, name: str) -> VariableTracker:
            return ConstantVariable.create(getattr(self.kernel, name))

    def kernel(self: Any, value: Kernel) -> VariableTracker:
        self.install_guards(GuardBuilder.ID_MATCH)
        return KernelVariable(value, source=self.source)

    # What runs a program is no part of it; names.py may be called in what is compiled.
    rooms = "around autocast backend dynamo group kernels module report state tensor"
    for name in rooms.split():
        trace_rules.add(f"neuron_cpu.torch_device.{name}")
    trace_rules.add("neuron_cpu.core")
    trace_rules.add("neuron_cpu.announce")
    types = VariableBuilder._type_dispatch()
    types[NeuronTensor] = VariableBuilder.wrap_tensor
    types[Kernel] = types[TodaysKernel] = kernel


class Call:
    """A kernel with its constants: a node's function, which takes the tensors alone."""

    def __init__(self, kernel: Kernel, args: list, kwargs: dict) -> None:
        self.kernel, self.args, self.kwargs = kernel, args, kwargs
        self.__name__ = self.__qualname__ = kernel.name
        self.__module__ = __name__

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.kernel(*filled(self.args, tensors), **filled(self.kwargs, tensors))
