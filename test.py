"""The benchmark run: every prompt of prompts.txt through the driver, with NKI, and a report.

`python test.py` is `python main.py --enable-nki --mode evaluate_all`; it takes the driver's
arguments, above all --limit, --only, --resume, --batch-size, --seq-len and --record-baseline;
`--llama a.py b.py c.py` compares submissions.
"""

import sys

import main

if __name__ == "__main__":
    sys.exit(main.script(["--mode", "evaluate_all", "--enable-nki", *sys.argv[1:]]))
