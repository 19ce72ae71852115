"""When a test's case runs: for ``make test``, only for ``make test-ci``, or only for ``make test-slow``.

This is the one place that decides, by three markers: a test or a case is marked ``ci`` or ``slow``, or
``sample(n, ci=m)`` divides the cases of a parametrised test among all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

#: In the place of a number: of the cases of a test, none is slow.
OTHERS = "others"


def mark_tiers(items: Sequence[pytest.Item]) -> None:
    """Of a test marked ``sample(n, ci=m)``, leave n cases to ``make test``; mark m as ``ci``, and the others as slow.

    Cases that have a marker of their own aren't counted. Those of ``make test``, and those of both, are evenly spread.
    """
    cases_by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if "sample" in markers and markers.isdisjoint({"ci", "slow"}):
            cases_by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in cases_by_test.values():
        first, more = _counts(cases[0], len(cases))
        not_slow = _spread(cases, first + more)
        at_first = _spread(not_slow, first)
        for case in cases:
            if case not in not_slow:
                case.add_marker(pytest.mark.slow)
            elif case not in at_first:
                case.add_marker(pytest.mark.ci)


def _counts(case: pytest.Item, among: int) -> tuple[int, int]:
    """How many cases ``make test`` runs, and ``make test-ci``."""
    marker = case.get_closest_marker("sample")
    assert marker is not None
    (first,) = marker.args
    more = marker.kwargs.get("ci", 0)
    return first, among - first if more == OTHERS else more


def _spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """The given number of cases, the first and the last among them."""
    places = {round(place * (len(cases) - 1) / max(count - 1, 1)) for place in range(count)}
    return [cases[place] for place in sorted(places)]
