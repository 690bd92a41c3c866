"""A plugin of pytest that prints the text of a failure at once, and not at the end of the run.

`make gpu` loads it with `-p benchmarks.gpu.failures_now`. A run that is killed for its time has no
end, and a test that hangs takes with it whatever its neighbours had to say.
"""

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Under xdist, the controlling process gets the reports of all workers."""
    if report.failed:
        print(f"\n=== FAILED {report.nodeid} ({report.when})", report.longreprtext, sep="\n")
        sys.stdout.flush()
