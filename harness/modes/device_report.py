"""`--mode device-report`: everything that an hour on a device can settle, in one file.

Without a device it is a rehearsal: the same calls, answered by the stand-in with estimates.
"""

from harness import console
from harness.device import hour, page
from harness.settings import Settings


def run(settings: Settings) -> int:
    """Measure as much as fits into the minutes; print the findings and the report's path."""
    report = hour.run(settings.report, settings.minutes)
    print("\n".join(page.sentences(report)))
    console.say(f"Wrote {settings.report} and {settings.report.with_suffix('.md')}")
    return 0
