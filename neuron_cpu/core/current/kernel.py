"""Calling kernels of the current language: ``nki.jit`` and ``nki.simulate``."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from typing import Any

import torch

from ..check import verify
from ..device import dtypes, ranks
from ..device.errors import refuse, strict, users_line, warn
from ..device.refusals import speaking
from ..device.release import nki_since, of_nki, said_by
from ..device.spec import CORE, NeuronCore, using
from ..device.target import TARGETS, chosen, needs
from ..device.unknown import LAUNCH
from ..instructions.ranks import COLLECTIVE
from ..language import kernel as calling
from ..language.specialisation import (
    add_output,
    adopt_results,
    check_writable,
    hand_back,
    line_of,
    rebuilt,
    to_torch,
)
from ..program import trace
from ..program.program import Program
from ..program.regions import place
from ..program.storage import Frame, Loop, Storage
from ..program.view import View, called
from ..run.eager import Machine
from ..run.execute import Plan
from ..run.instances import WrittenByBoth
from . import creation  # noqa: F401 - gives tensors t[...] = value
from .control import NeedsValues
from .cores import Turns
from .subset import lint
from .tensor import NkiTensor

PRECISE_FP = "NKI_PRECISE_FP"  # 0: low-precision tensors are kept in fp32
CC_FLAGS, FP8_FLAG = "NEURON_CC_FLAGS", "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
# Options of nki.jit in releases and public kernels; all but the target mean nothing here.
TAKEN = ("platform_target", "mode", "debug_kernel", "show_compiler_tb", "additional_compile_opt")
CORES = (1, 2)  # physical cores of a logical one


class Kernel(calling.Kernel):
    """A function under ``nki.jit``: callable with torch tensors or numpy arrays.

    ``kernel[2](...)`` runs it on both physical cores of a logical core (gen3 and later). Inputs
    that the kernel writes are updated in place. Inside another kernel the function is inlined.
    """

    today = True

    def __getitem__(self, cores: Any) -> Kernel:
        cores = cores[0] if isinstance(cores, tuple) and len(cores) == 1 else cores  # [(2,)]
        __tracebackhide__ = True  # as in __call__
        if cores not in CORES or isinstance(cores, bool):
            given = getattr(cores, "__name__", repr(cores))
            raise refuse(
                "sim_launch",
                f"kernel {self.name} is launched with [{given}], expected 1 or 2 cores: grids and "
                f"threads are gone; write {self.name}(...), or {self.name}[2](...) for two cores, "
                "and loop inside the kernel over what they divided",
            ).with_traceback(users_line())
        launched = type(self)(self.function, (int(cores),), **self.options)
        launched.programs, launched.lock = self.programs, self.lock
        return launched

    def _called(self, args: tuple, kwargs: dict) -> Any:
        if not args and not kwargs:
            raise refuse(
                "sim_no_arguments",
                f"kernel {self.name} is called without arguments, expected its tensors; pass them",
                line_of(self.function),
            )
        self._check_fp8(self._keyed(args, kwargs)[0])
        try:
            return super()._called(args, kwargs)
        except NeedsValues:  # executed while it is recorded, as far as there are values
            tensors, _ = self._flatten(args, kwargs)
            if any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors):
                raise
            return self._eager(args, kwargs)

    def _check_fp8(self, tensors: list[Any]) -> None:
        """PyTorch's float8_e4m3fn, which XLA hands to the compiler as such; graphs check theirs."""
        told = any(getattr(one, "dtype", None) is torch.float8_e4m3fn for one in tensors)
        if told and not calling.in_a_graph() and FP8_FLAG not in os.environ.get(CC_FLAGS, ""):
            with using(self._core()), speaking(True):
                if CORE.number < 4:
                    warn(
                        "sim_fp8_argument",
                        f"kernel {self.name} got an argument of torch.float8_e4m3fn, expected a "
                        "type that the compiler reads on this chip; pass its bytes as uint8 and "
                        f"view them as nl.float8_e4m3, or have {FP8_FLAG} in {CC_FLAGS}",
                        line_of(self.function),
                    )

    def trace_with_values(self, *args: Any, **kwargs: Any) -> Program:
        """The verified Program for these values, of a kernel whose control flow is data.

        It runs on copies while it is recorded: the arguments stay unchanged.
        """
        copied = rebuilt(list(args), _copy), rebuilt(kwargs, _copy)
        program = self._record(tuple(copied[0]), copied[1], Machine())
        program.for_values = True
        self._check(program)
        return program

    def with_schedule(self, edges: Any) -> Kernel:
        """The kernel with instructions ordered by name: pairs (consumer, producer or producers)."""
        return type(self)(self.function, self.grid, **{**self.options, "edges": tuple(edges)})

    # --- arguments --------------------------------------------------------------------------------
    def _enter(self, storage: Storage, name: str, shape: tuple[int, ...]) -> None:
        storage.mutable = True  # which ones it writes is known at the end

    def _core(self) -> NeuronCore:
        target = self.options.get("platform_target")
        return chosen() if target is None else TARGETS[target]

    def _rules(self) -> tuple:
        with said_by(self.function):
            return (self._core().name, strict(), ranks.own().rank, of_nki())

    def _record(self, args: tuple, kwargs: dict, machine: Any = None) -> Program:
        with using(self._core()), said_by(self.function), speaking(True):
            program = Program(self.name, self.grid, self.function)
            program.today, program.open_values = self.today, True
            if machine is not None:
                machine.open_values = True
            code = getattr(self.function, "__code__", None)
            linecache.checkcache(getattr(code, "co_filename", ""))  # notebooks reload modules
            with trace.Tracer(program, code, machine, NkiTensor) as tracer:
                result = self._run(tracer, args, kwargs, machine)
                adopt_results(program, _leaves(result))
                _order_by_name(program, self.options.get("edges", ()))
                tracer.finish()
            _collect(program, result)
            return program

    def _run(self, tracer: trace.Tracer, args: tuple, kwargs: dict, machine: Any) -> Any:
        """Run the function once for each core; the first one's result counts."""
        _check_arguments(self.function, args)
        bound_args, bound_kwargs = self._bind(tracer, args, kwargs, machine)
        cores = self.grid[0] if self.grid else 1
        if cores == 1:
            tracer.grid_index = (0,)
            tracer.begin_instance()
            return self.function(*bound_args, **bound_kwargs)
        needs(f"kernel[{cores}]", 3)  # one core is all of a logical one on gen2
        program = tracer.program
        program.cores = cores
        program.copies = True  # until one asks for its number
        loop = Loop(-1, "grid", cores, None)
        phases: dict[int, str | None] = {}  # how often a core met the other, and where last

        def body(core: int) -> Any:
            tracer.grid_index = (core,)
            tracer.frame = Frame(loop, core, None)
            tracer.begin_instance()
            result = self.function(*bound_args, **bound_kwargs)
            phases[tracer.meetings.phase] = tracer.meetings.last
            return result

        if machine is None:
            results = [body(core) for core in range(cores)]
        else:  # what a core does next may depend on what the other one did
            machine.both = WrittenByBoth(program, None)
            tracer.turns = Turns(tracer)
            results = tracer.turns.run(body)
            machine.both.finish()
        if len(phases) > 1:
            raise refuse(
                "sim_core_barrier",
                f"the cores of {self.name} meet {sorted(phases)} times, expected equally often; "
                "call core_barrier and sendrecv on both",
                phases[max(phases)] or self.name,
            )
        tracer.frame = None
        for storage in program.storages:  # a core's own tiles outlive its phases
            if storage.frame is not None and (tracer.phase_loops or storage.frame.parent is None):
                storage.frame = storage.memory.frame = None
        return results[0]

    def _check(self, program: Program) -> None:
        with said_by(self.function), using(program.core), speaking(True):
            lint(program.function)
            verify.verify(program)

    def _execute(self, program: Program, tensors: list[Any]) -> list[Any]:
        if os.environ.get(PRECISE_FP, "1") != "0":
            return super()._execute(program, tensors)
        # Every float tensor in fp32, as the vendor's simulator does then; the results are rounded.
        check_writable(program, tensors)
        hosted = [to_torch(t) for t in tensors]
        plan = Plan(program, shadow=True)
        wide = plan.start(hosted)
        with torch.inference_mode():
            for number in range(len(plan.ops)):
                plan.step(number)
        plan.finish(wide)
        kept = {storage: _rounded(storage, wide[storage.id]) for storage in program.outputs}
        for storage, host in zip(program.inputs, hosted):
            if storage.mutable:
                host.copy_(_rounded(storage, wide[storage.id]).reshape(host.shape))
        return hand_back(program, tensors, hosted, [kept[storage] for storage in program.outputs])


def _rounded(storage: Storage, wide: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to a storage's type; bits of several types stay unchanged."""
    if storage.ground is not None:
        return wide
    return dtypes.encode(wide, storage.dtype) if storage.dtype.is_float else wide


# --- arguments ------------------------------------------------------------------------------------
def _copy(value: Any, _: str) -> torch.Tensor:
    return to_torch(value).clone()


def _tensors(value: Any) -> list[Any]:
    """The tensors inside of an argument."""
    found: list[Any] = []
    rebuilt(value, lambda tensor, _: found.append(tensor))
    return found


def _check_arguments(function: Callable, args: tuple) -> None:
    """Refuse lists, and warn of tensors inside of others: devices' frontends did."""
    for k, value in enumerate(args):
        if isinstance(value, list):
            one = "write np.array(..., np.float32) around data, tuple(...) around constants"
            one = "give its tensors one by one" if _tensors(value) else one
            raise refuse(
                "sim_list_argument",
                f"argument {k} of {function.__name__} is a list, expected a tuple, or data as a "
                f"numpy array or torch tensor; {one}",
            )
        if isinstance(value, (tuple, dict)) and _tensors(value):
            warn(  # KevGomes1403/nki-moe-megakernel 621932e, megakernels/qwen3_moe
                "sim_tensors_in_tuple",
                f"argument {k} of {function.__name__} has tensors inside of it, expected each as "
                "an argument by itself: a device's frontend gave them no place in HBM; list "
                "them one by one",
                line_of(function),
            )


# --- results --------------------------------------------------------------------------------------
def _leaves(result: Any) -> list[Any]:
    """Tensors of a nested result, in order."""
    if isinstance(result, (list, tuple)):
        return [leaf for one in result for leaf in _leaves(one)]
    return [result] if isinstance(result, View) else []


def _form(result: Any) -> Any:
    """The nesting of a result: None for a tensor; other values are dropped."""
    if isinstance(result, (list, tuple)):
        return [_form(one) for one in result if isinstance(one, (View, list, tuple))]
    return None


def _outputs(written: set[Storage]) -> str:
    """The names of the written tensors that a kernel can return."""
    fits = [one for one in written if one.buffer == "shared_hbm" or one.role == "input"]
    return ", ".join(name for _, name in sorted([(one.id, one.name) for one in fits if one.name]))


def _stored(program: Program, value: View, written: set[Storage]) -> str:
    """What returns a tile: a store into the output that nobody has written, if there is one."""
    made = {s for s in program.storages if s.role == "output" and s.shape == value.shape}
    fresh = _outputs(made - written).split(", ")[0]
    other = fresh or _outputs(written).split(", ")[0]
    told = f"store it, nisa.dma_copy(dst={other or 'result'}, src={called(value)}), "
    if fresh:
        return f"{told}in place of a line {fresh} = ..., and return {fresh}"
    new = f"result, made with nl.ndarray({value.shape}, dtype=nl.{value.dt}, buffer=nl.shared_hbm)"
    return f"{told}and return {other or new}"


def _collect(program: Program, result: Any) -> None:
    """Outputs are the returned tensors; written inputs count as updated in place.

    Raises:
        NkiError: nothing is returned, or a value that is no whole tensor in shared HBM.
    """
    written = {v.storage for i in program.instructions for v in i.dst}
    written |= {base for alias, base in program.aliases if alias in written}
    leaves = _leaves(result)
    if not leaves:
        raise refuse(
            "err_tensor_output_not_written_to",
            f"kernel {program.name} returns no tensor, expected at least one in nl.shared_hbm; "
            + (
                f"write return {_outputs(written)}, tensors alone or in a tuple"
                if _outputs(written)
                else "return the outputs, alone or in a tuple, with return and not yield"
            ),
            program.place,
        )
    for value in result if isinstance(result, (list, tuple)) else ():
        if isinstance(value, (int, float, str)):
            warn(
                "sim_dropped_result",
                f"kernel {program.name} returns {value!r} beside its tensors, expected tensors "
                "alone: its caller gets nothing else; leave it out",
                program.place,
            )
    for value in leaves:
        if value.storage.role != "input" and value.storage.buffer != "shared_hbm":
            raise refuse(
                "err_unsupported_memory",
                f"kernel {program.name} returns {value.label()}, expected tensors made with "
                f"buffer=nl.shared_hbm or inputs; {_stored(program, value, written)}",
                program.place,
            )
        add_output(program, value)
    program.result_form = _form(result)
    for storage in program.inputs:
        storage.mutable = storage in written or storage in program.outputs
    _check_exchanged(program)
    _check_scratch(program)


def _check_exchanged(program: Program) -> None:
    """Warn of collectives on what enters or leaves the kernel."""
    outside = {*program.inputs, *program.outputs, *(alias for alias, _ in program.aliases)}
    for one in (one for one in program.instructions if one.op is COLLECTIVE):
        attrs: Any = one.attrs
        for found in {view.storage for view in (*one.dst, *one.src)} & outside:
            # aws-neuron/nki-library d2ad3a5, test_collectives.py
            what = "an argument" if found.role == "input" else "a result"
            warn(
                "sim_exchanged_outside",
                f"{attrs.kind} of {found.label()}, {what} of {program.name}: a device's compiler "
                "refused that, expected tensors made in the kernel; copy with nisa.dma_copy before "
                "and behind",
                place(program, one),
            )


def _check_scratch(program: Program) -> None:
    """Warn of scratch that cores could share, on a chip whose cores share nothing: a kernel alone
    ran so (trnsci/trntensor cfad107, ao_to_mo_transform_kernel), graphs with it were refused."""
    if CORE.number > 2:
        return
    read = {view.storage for one in program.instructions for view in one.src}
    for found in program.storages:
        scratch = found.buffer == "shared_hbm" and found.role == "output"
        if scratch and found in read and found not in program.outputs:
            warn(
                "sim_shared_scratch",
                f"{found.label()} is scratch in shared memory: a trn1 ran that in a kernel alone, "
                "and its compiler refused it in graphs, expected buffer=nl.private_hbm; make it "
                "so where no other core reads it",
                program.place,
            )


def _order_by_name(program: Program, edges: Any) -> None:
    """Edges of ``with_schedule``."""
    for consumer, producers in edges:
        for producer in [producers] if isinstance(producers, str) else producers:
            for name in (consumer, producer):
                if name not in program.names:
                    raise refuse(
                        "sim_schedule_name",
                        f"with_schedule of {program.name} names '{name}', expected one of "
                        f"{', '.join(program.names) or 'none: no instruction has a name'}; give "
                        "the instruction name=",
                        program.name,
                    )
            first, second = program.names[producer], program.names[consumer]
            program.edges += [(first[core], second[core]) for core in first if core in second]


# --- decorators -----------------------------------------------------------------------------------
def jit(fn: Any = None, **options: Any) -> Any:
    """``@nki.jit``, ``@nki.jit()`` or ``nki.jit(fn)``: a kernel of the current language.

    ``platform_target``, of 2.27 and 2.28, chooses its generation; later releases leave that to the
    environment, so there it is a warning.
    """
    __tracebackhide__ = True
    if fn is None:
        return lambda f: jit(f, **options)
    target = options.get("platform_target")
    for name in sorted(options.keys() - TAKEN):
        warn(
            "sim_jit_option",
            f"nki.jit({name}=...) has no effect, expected options among {', '.join(TAKEN)}; "
            + LAUNCH.get(name, "leave it out, and give shapes and constants to the call"),
            advice=True,
        )
    if target is None:
        return fn if isinstance(fn, Kernel) else Kernel(fn)
    if target not in TARGETS:
        raise refuse(
            "sim_jit_option",
            f"nki.jit(platform_target={target!r}), expected one of {', '.join(TARGETS)}; "
            "leave it out for the chip of the environment",
        )
    with said_by(fn):
        if nki_since("2.29"):
            warn(
                "sim_former_spelling",
                f"nki.jit(platform_target={target!r}) is a spelling of SDK 2.27 and 2.28, which "
                f"{of_nki()} refuses, expected NEURON_PLATFORM_TARGET_OVERRIDE in the environment; "
                "set that",
            )
    return Kernel(fn, platform_target=target)


def simulate(kernel: Any, *args: Any) -> Any:
    """``nki.simulate(kernel)(*args)``: every kernel is simulated here; functions become kernels."""
    if args or not callable(kernel):
        raise refuse(
            "sim_arguments",
            "nki.simulate got arguments or results, expected the kernel, and a second call; write "
            "nki.simulate(kernel)(arguments)",
        ).with_traceback(users_line())
    return jit(kernel)
