"""`--mode compile`: build and check every sub-model and bucket, say which operator ran where."""

from harness.figures import graphs
from harness.output import operators
from harness.session.building import build
from harness.session.opening import open_session
from harness.settings import Settings


def run(settings: Settings) -> int:
    """Compile the changed graphs and print the operators of each graph."""
    loaded = build(open_session(settings))
    operators.print_operators(graphs.read(loaded.folder))
    if settings.enable_nki:
        operators.report_outside_nki(loaded.folder)
    return 0
