"""Two hosts on one machine: network namespaces with a switch between them."""

import os
import sys

import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from network.networks import NetworkError, Shaped, open_network, why_not_shaped

#: Addresses of the hosts, and the interface that has them.
ADDRESSES, INTERFACE = ("10.231.0.1", "10.231.0.2"), "e0"


@pytest.fixture(name="two_hosts")
def hosts_in_namespaces():
    """The process id that holds the switch between two hosts."""
    reason = why_not_shaped()
    if reason is not None:
        pytest.skip(reason)
    try:
        with open_network("shaped", 2) as network:
            yield network._hub_pid
    except NetworkError as error:
        pytest.skip(str(error))


if __name__ == "__main__":
    # two_hosts.py HOST HUB COMMAND …: run a command on one of them.
    Shaped(2, int(sys.argv[2])).enter(int(sys.argv[1]))
    os.execvp(sys.argv[3], sys.argv[3:])
