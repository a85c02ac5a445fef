"""How well constants of played devices come back: a table over seeds.

    python -m tests.lab.recovery [--target trn2] [--today] [--first 100] [--seeds 20]
        [--keep FILE]

Each seed is a device with constants, noise and a change of mechanism of its own. Results are kept
in FILE as they come, and seeds that it has are not run again.
"""

import argparse
import collections
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import neuron_cpu

neuron_cpu.ensure_sdk()
warnings.simplefilter("ignore")

from lab.device import calls, fit, model, plan  # noqa: E402
from lab.device.rows import ROWS  # noqa: E402
from neuron_cpu.core.time import cost  # noqa: E402
from tests.lab import played  # noqa: E402

MECHANISMS = (None, *fit.MECHANISMS)
GRAPHS = ("decode-640",)


def kernels(today):
    """Calls of the kernels of a graph of Llama-3.2-1B."""
    return {
        f"{name} {number}": call
        for name in GRAPHS
        for number, call in enumerate(
            model.graph(name, calls.SUBMISSIONS[today], plan.DEGREE[today])["kernels"]
        )
    }


def one(seed, target, today, large):
    """Measure a device twice: constants from the first run, times of both under them."""
    device = played.Device(seed, MECHANISMS[seed % len(MECHANISMS)], target=target, today=today)
    begun = time.process_time()
    found = fit.fit(played.times(device, ROWS), today)
    took = time.process_time() - begun
    second = played.times(device, ROWS) | played.of_calls(device, large)
    profile = cost.read_profile(fit.profile_of(found, "fitted", ""))
    costs = {name: found["constants"][name]["value"] for name in model.OVERHEADS}
    every = {name: plan.of_row(row, today).call for name, row in ROWS.items()}
    cost.PROFILES["fitted"] = profile
    model._traced.cache_clear()
    far = {
        name: model.graph_ns(call, costs, "fitted", found["order"]) / 1e3 / second[name] - 1
        for name, call in (every | large).items()
    }
    del cost.PROFILES["fitted"]
    worst = max(far, key=lambda name: abs(far[name]))
    told = {name: one for name, one in found["constants"].items() if one["told"]}
    errors = {
        name: one["value"] / device.constants[name] - 1
        for name, one in told.items()
        if name in device.constants
    }
    return {
        "seed": seed,
        "mechanism": device.mechanism,
        "named": found["mechanisms"],
        "alike": found["alike"],
        "told": len(told),
        "constants": len(found["constants"]),
        "errors": errors,
        "untold": sorted(set(found["constants"]) - set(told)),
        "worst": [worst, far[worst]],
        "worst kernel": max((abs(far[name]) for name in large), default=0.0),
        "seconds": took,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="of the seeds")
    parser.add_argument("--target", default="trn1")
    parser.add_argument("--today", action="store_true", help="kernels of nki")
    parser.add_argument("--keep", type=Path, default=Path("recovery.jsonl"))
    args = parser.parse_args()
    kept = [json.loads(line) for line in args.keep.open()] if args.keep.exists() else []
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = args.target
    large = kernels(args.today)
    for seed in range(args.first, args.first + args.seeds):
        if seed in {found["seed"] for found in kept}:
            continue
        kept.append(one(seed, args.target, args.today, large))
        with args.keep.open("a") as file:
            file.write(json.dumps(kept[-1]) + "\n")
        print(kept[-1], file=sys.stderr, flush=True)
    errors = [abs(error) for found in kept for error in found["errors"].values()]
    right = sum(found["named"] == [found["mechanism"]] * bool(found["mechanism"]) for found in kept)
    beyond = sum(error > fit.TOLD for error in errors)
    alike = sum(found["mechanism"] in set(found["alike"]) - set(found["named"]) for found in kept)
    print(f"{len(kept)} devices: mechanism right in {right}, said not to be told in {alike}")
    print(
        f"constants told: {len(errors)}; median error {statistics.median(errors):.2%}, largest "
        f"{max(errors):.2%}, beyond 5 %: {beyond}"
    )
    untold = collections.Counter(name for found in kept for name in found["untold"])
    print(
        f"untold: {sum(untold.values())} of {sum(found['constants'] for found in kept)}: {untold}"
    )
    worst = max(abs(found["worst"][1]) for found in kept)
    kernel = max(found["worst kernel"] for found in kept)
    print(
        f"second run: largest distance of a time {worst:.2%}, of a kernel of llama.py {kernel:.2%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
