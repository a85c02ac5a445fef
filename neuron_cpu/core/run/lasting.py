"""Operations that compute the same in every run: they run once for each plan.

Masks, selection matrices and zero biases come from constants alone. Their tiles keep memory of
their own, and from the second run on the operations that made them are left out.
"""

from .merge import JOINED_ELEMENTS, Op, users


def constants(ops: list[Op]) -> set[int]:
    """Ids of the memories that hold what tracing knew, and that nobody writes."""
    known = {id(ref.memory) for op in ops for ref in op.src if ref.memory.storage.data is not None}
    return known - {id(ref.memory) for op in ops for ref in op.dst}


def lasting(ops: list[Op]) -> tuple[set[int], set[int]]:
    """(places of the operations, ids of the memories) that one run settles for all later ones.

    A memory lasts if all that writes it does, and everything else reads it after that. Together
    they take no more than ``JOINED_ELEMENTS``.
    """
    writers, readers = users(ops)
    memories = {id(ref.memory): ref.memory for op in ops for ref in op.refs()}
    # Tiles that are read as types of several sizes have memory that others write, too.
    kept = {
        key
        for key in writers
        if memories[key].storage.role == "local" and memories[key].storage.ground is None
    }
    constant = {key for key, memory in memories.items() if memory.storage.data is not None}
    made = {
        at
        for at, op in enumerate(ops)
        if op.dst and not op.spec.meets and not any(r.by_data for r in op.dst)
    }
    # Each loss may cost others: until nothing changes.
    while True:
        steady = (kept | constant) - {key for key in constant if key in writers}
        still = {
            at
            for at in made
            if all(id(r.memory) in steady for r in ops[at].refs())
            and all(id(r.memory) in kept for r in ops[at].dst)
        }
        room = JOINED_ELEMENTS
        left = set()
        for key in sorted(kept, key=lambda k: writers[k][0]):
            late = [at for at in readers.get(key, ()) if at not in still]
            if still.issuperset(writers[key]) and min(late, default=len(ops)) > writers[key][-1]:
                room -= memories[key].size
                if room >= 0:
                    left.add(key)
        if left == kept and still == made:
            return made, kept
        kept, made = left, still
