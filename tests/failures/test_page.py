"""The page of :mod:`cuboid.failures` says how long each wait takes at most: those are the constants of the code."""

import re

from cuboid import failures
from cuboid.failures import rendezvous, startup, whereabouts
from cuboid_patches import interpreter

EXPECTED = {
    "starting": [],
    "failed at the start": [startup._LINGER_S, startup._LEAVE_S],
    "in a meeting": [],
    "failed, the first": [rendezvous._GRACE_S],
    "failed, later": [rendezvous._DECISION_S],
    "has the outcome": [rendezvous._LEAVE_S],
    "in a step": [],
    "there alone": [whereabouts.STILL_S, whereabouts._LONGEST_LOOK_S, whereabouts.CONFIRMED_S],
    "failed in a step": [rendezvous.POST_MORTEM_S, 2 * rendezvous._LISTEN_S],
    "lost a peer": [rendezvous._LOSS_S, 2 * rendezvous._LOSS_S],
    "ended": [interpreter._GRACE_S],
}


def test_the_bounds_on_the_page_are_those_of_the_code():
    """Each row's seconds, from the last of three columns whose widths the first line of the table shows."""
    rule, _, _, *rows, _ = failures.__doc__.split("\n\n")[2].splitlines()
    first, last = rule.index(" "), rule.rindex(" ") + 1
    seconds, state = {}, ""
    for line in rows:
        state = line[:first].strip() or state
        seconds.setdefault(state, []).extend(map(float, re.findall(r"(\d+) s\b", line[last:])))
    assert seconds == EXPECTED
