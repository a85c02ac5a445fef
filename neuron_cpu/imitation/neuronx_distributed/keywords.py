"""Keywords of later releases: those without effect here are taken, others refused."""

from typing import Any


def refuse_others(owner: str, given: dict[str, Any], **known: Any) -> None:
    """Refuse keywords of later releases that the stand-in cannot honour.

    TypeError for a keyword that no release has. NotImplementedError for another value than the one
    known; the value ``...`` allows any, because that keyword changes no result.
    """
    unknown = sorted(given.keys() - known)
    if unknown:
        raise TypeError(f"{owner} got unexpected keyword arguments {unknown}; leave them out.")
    for name, value in given.items():
        if known[name] is not ... and value not in (known[name], None):
            raise NotImplementedError(
                f"{owner} got {name}={value!r}, expected {known[name]!r}, because neuron_cpu does "
                "not model it; leave it out or write that part yourself."
            )
