"""What golden tests have to say besides passing: cases of methods not built, and informational ones."""

from __future__ import annotations

import pytest

UNBUILT: dict[str, list[str]] = {}
INFORMATIONAL: dict[str, list[str]] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if UNBUILT:
        terminalreporter.section("golden cases of methods that are not built")
        for method, cases in sorted(UNBUILT.items()):
            terminalreporter.line(f"{method} ({len(cases)}): {', '.join(cases)}")
    if INFORMATIONAL:
        terminalreporter.section("informational golden cases")
        for case, misses in sorted(INFORMATIONAL.items()):
            terminalreporter.line(f"{case}: {'; '.join(misses) if misses else 'agrees'}")
