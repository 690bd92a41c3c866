"""A plugin of pytest that prints the text of a failure at once, and not at the end of the run.

`make gpu` loads it with `-p benchmarks.gpu.failures_now`. A run that exceeds its time is killed
before pytest prints its summary, and the failures would be lost.
"""

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints the text of a failure. Under xdist, all workers report to the controlling process."""
    if report.failed:
        print(f"\n=== FAILED {report.nodeid} ({report.when})", report.longreprtext, sep="\n")
        sys.stdout.flush()
