"""Actions of the command line that model scripts share."""

import argparse
from typing import Any, List, Optional, Union

AUTO = "auto"


class StringOrIntegers(argparse.Action):
    """The word "auto" alone, or integers."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: Optional[str] = None
    ) -> None:
        given = [str(value).lower() for value in values]
        numbers = [word.lstrip("-").isdigit() for word in given]
        if given != [AUTO] and not all(numbers):
            raise argparse.ArgumentTypeError(
                f"{option_string} got {' '.join(given)!r}, expected {AUTO!r} alone or integers."
            )
        made: Union[str, List[int]] = AUTO if given == [AUTO] else [int(word) for word in given]
        setattr(namespace, self.dest, made)
