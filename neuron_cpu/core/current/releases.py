"""Changes between releases of `nki`: new names and keywords, and spellings of 2.27 and 2.28.

Sources: signatures in aws-neuron-sdk v2.28.0 to v2.32.0 (nki/api/nki), release notes of each (2.33:
awsdocs-neuron.readthedocs-hosted.com/en/v2.33.1/release-notes/components/nki.html), and the update
guide (nki/migration/nki-0-3-0-update-guide.rst). Up to 2.28 the old spellings are the expected
ones. Later they are taken with a warning, as far as they still say what to do.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..device.errors import refuse, warn
from ..device.release import nki_since, of_nki
from ..device.target import needs
from ..instructions.entry import FORMS, Form
from ..language.operands import fitted
from .operands import label, tensor

# Names of `nki.language`, which are no instructions: first releases, of keywords, too, and what a
# keyword of 2.27 and 2.28 may be left out for.
MATH = """
all arctan broadcast_to ceil copy cos dropout empty_like erf erf_dx exp expand_dims floor fmod
full gather_flattened gelu gelu_apprx_tanh gelu_dx load load_transpose2d log matmul max mean min
mish mod negative ones prod rand random_seed relu rms_norm sigmoid sign silu silu_dx sin softmax
softplus sqrt square store sum tan tanh transpose trunc var where zeros_like
"""
CAME = dict.fromkeys(MATH.split(), "2.29") | {
    "abs_max": "2.30", "abs_min": "2.30", "fori_loop": "2.32", "while_loop": "2.32",
} | dict.fromkeys(("tiles", "blocks", "alloc_tiles", "alloc_blocks"), "2.33")  # fmt: skip
KEYWORDS: dict[str, dict[str, str]] = {"ndarray": {"address": "2.29"}}
FORMER: dict[str, dict[str, str | None]] = {"shared_constant": {"dtype": None}}
# What else they changed, for the documentation.
OTHERS = (
    ("2.29", "accesses to memory regions by string (`buffer=\"sbuf\"`) are refused"),
    ("2.29", "`tensor_reduce(axis=1)` is axis 1; before, it was the last one of any rank"),
    ("2.31", "`quantize_mx` writes twice the scale of the OCP sample"),
    ("2.31", "stubs begin to name `permute`, `broadcast`, `expand_dim`, `slice` and `select` of "
             "tensors, `nl.average` and `nl.float8_e8m0fnu` (2.30: `nl.prelu`, `nl.bypass`; 2.32: "
             "`depends_on`); here older releases take them, too, so a device may refuse them"),
    ("2.33", "kernels are traced by Python: all of Python, no subset (`sim_parser_subset`)"),
    ("2.33", "`nl.dynamic_range` and `while` of a register are to become `nl.fori_loop` and "
             "`nl.while_loop`"),
)  # fmt: skip


def released(one: Form) -> Callable:
    """The function of a form, which refuses arguments that it, its release or generation lacks."""
    prefix = "nl." if one.module == "nki.language" else ""
    return fitted(
        one.function,
        check=lambda value, what: tensor(value, prefix + what),
        label=label if one.named else None,
        shown=one.named,
        entry=one.entry,
        prepare=_checked(one),
    )


def _checked(one: Form) -> Callable[[tuple, dict[str, Any]], tuple] | None:
    """What a call of a form is checked for before it runs; None where there is nothing."""
    name, came, generation, keywords = one.name, one.came, one.generation, one.keywords
    watched = {*keywords, *one.former}
    if generation == 2 and not (came or watched or one.order):
        return None

    def check(args: tuple, named: dict[str, Any]) -> tuple:
        __tracebackhide__ = True  # as in a kernel's call
        if came and not nki_since(came):
            raise _newer(name, came)
        for word in () if watched.isdisjoint(named) else sorted(watched.intersection(named)):
            if word in one.former:
                now, value = one.former[word], named.pop(word)
                if now is not None:
                    named[now] = value
                if nki_since("2.29"):
                    mend = f"leave {word}= out" if now is None else f"write {now}= for {word}="
                    warn(
                        "sim_former_spelling",
                        f"{name}({word}=) is a spelling of SDK 2.27 and 2.28, expected that of "
                        f"{of_nki()}; {mend}",
                    )
            elif not nki_since(keywords[word]):
                raise _newer(f"{name}({word}=)", keywords[word])
        if generation > 2:
            needs(name, generation)
        in_order = one.order[: len(args)]
        if len(in_order) > 2 and named.keys().isdisjoint(in_order) and not nki_since("2.29"):
            named.update(zip(one.order, args))
            return ()
        return args

    return check


def _newer(what: str, release: str) -> Exception:
    return refuse(
        "sim_newer_release",
        f"{what} is there from SDK {release} on, expected what {of_nki()} has; choose the release "
        "with NEURON_CPU_NKI, in the environment or in the kernel's file",
    )


def exported(module: str) -> dict[str, Callable]:
    """The functions that a module of `nki` offers: the forms of its instructions."""
    return {name: released(one) for name, one in FORMS[module].items()}


def of_language(names: dict[str, Any]) -> dict[str, Callable]:
    """The functions among the names of ``nki.language``, entered as forms of no instruction."""
    module = "nki.language"
    for name, function in names.items():
        if isinstance(function, FunctionType) and name[0] != "_":
            FORMS.setdefault(module, {})[name] = Form(
                module=module,
                function=function,
                entry=None,
                came=CAME.get(name, ""),
                keywords=KEYWORDS.get(name, {}),
                former=FORMER.get(name, {}),
            )
    return exported(module)
