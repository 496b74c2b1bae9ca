"""Compare the quickstart's runs: the loss must fall, and a resumed run must equal an uninterrupted one exactly.

Usage: python examples/quickstart/check.py UNINTERRUPTED.log FIRST_HALF.log RESUMED.log
"""

import re
import sys

STEP = re.compile(r"^iteration (\d+)/\d+ \| loss (\S+) ", re.MULTILINE)
REQUIRED_FALL = 2.0
LAST_STEPS = 8
"""The loss of a step varies by a few tenths with its documents, so the fall is measured to the mean of these steps."""


def losses(path: str) -> dict[int, str]:
    """The loss of each iteration in a log, as it was printed."""
    with open(path, encoding="utf-8") as file:
        return {int(iteration): loss for iteration, loss in STEP.findall(file.read())}


def main(uninterrupted_path: str, first_half_path: str, resumed_path: str) -> int:
    """Print the comparison.

    Returns:
        0 if all holds, else 1.
    """
    uninterrupted, first_half, resumed = map(losses, (uninterrupted_path, first_half_path, resumed_path))
    iterations = sorted(uninterrupted)
    print("iteration  uninterrupted  stopped and resumed")
    for iteration in iterations[:: max(1, len(iterations) // 8)] + iterations[-1:]:
        other = first_half.get(iteration) or resumed.get(iteration)
        print(f"{iteration:9d}  {uninterrupted[iteration]:>13}  {other or 'missing':>19}")
    last = iterations[-LAST_STEPS:]
    fall = float(uninterrupted[iterations[0]]) - sum(float(uninterrupted[i]) for i in last) / len(last)
    same = first_half | resumed == uninterrupted and not first_half.keys() & resumed.keys()
    print(f"loss fell by {fall:.2f} in {len(iterations)} steps, to the mean of the last {len(last)} (needed: above 2)")
    print(f"{len(resumed)} resumed steps have {'the same losses as' if same else 'OTHER losses than'} without the stop")
    return 0 if fall > REQUIRED_FALL and same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
