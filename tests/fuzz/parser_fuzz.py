"""Runs the parser on mutated answers and checks each result. `python tests/fuzz/parser_fuzz.py --case N` replays one.

Prints one JSON line: the number of cases, the slowest one, and what failed.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from mutated_answers import case
from script_checks import check_form, check_lists, check_sources

from a3b_engine.script.parse import ParseResult, parse_script

SLOWEST = 0.5  # seconds of processor time one case may take; the slowest needs a tenth of it
MOST_FAILURES = 5


def clean(text: str) -> str:
    """The text as the parser sees it: halves of surrogate pairs are no characters."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def run_case(number: int) -> tuple[ParseResult, float]:
    """Parse one case and check the result, every fourth one twice and with each choice on an error; raises
    AssertionError, or whatever the parser raised."""
    text = case(number)
    start = time.process_time()
    result = parse_script(text)
    seconds = time.process_time() - start
    assert seconds < SLOWEST, f"{seconds:.2f} s of processor time"
    fourth = number % 4 == 0
    assert not fourth or parse_script(text) == result, "two results for one text"
    check_form(result)
    check_sources(result, clean(text))
    check_lists(result, ("stop", "keep") if fourth else ())
    assert not any("the rest is not read" in line for line in result.report), "the search for values does not advance"
    return result, seconds


def run(first: int, count: int) -> dict:
    failures, slowest, statuses = [], (0.0, first), {}
    for number in range(first, first + count):
        try:
            result, seconds = run_case(number)
        except Exception:  # whatever it is, it is reported with its case
            failures.append({"case": number, "error": traceback.format_exc(limit=-3)})
            if len(failures) >= MOST_FAILURES:
                break
            continue
        slowest = max(slowest, (seconds, number))
        statuses[result.status] = statuses.get(result.status, 0) + 1
    return {"cases": count, "slowest": slowest, "statuses": statuses, "failures": failures}


def show(number: int) -> None:
    text = case(number)
    result = parse_script(text)
    print(json.dumps({"text": text, "status": result.status, "cause": result.cause, "report": result.report}, indent=2))
    print(result.script.model_dump_json(indent=2) if result.script else "no script")
    run_case(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, metavar="N", help="show one case and check it")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    if options.case is not None:
        show(options.case)
        return 0
    outcome = run(options.first, options.count)
    print(json.dumps(outcome))
    return 1 if outcome["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
