"""Two hosts on one machine, or more: network namespaces with a switch between them."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from network.networks import NetworkError, Shaped, open_network, why_not_shaped

#: Addresses of the hosts, and the interface that has them.
ADDRESSES, INTERFACE = ("10.231.0.1", "10.231.0.2"), "e0"


@contextmanager
def switch_of(hosts):
    """The process id that holds the switch between so many hosts."""
    reason = why_not_shaped()
    if reason is not None:
        pytest.skip(reason)
    try:
        with open_network("shaped", hosts) as network:
            yield network._hub_pid
    except NetworkError as error:
        pytest.skip(str(error))


@pytest.fixture(name="two_hosts")
def hosts_in_namespaces():
    """The process id that holds the switch between two hosts."""
    with switch_of(2) as hub:
        yield hub


def cut_link(hub, host):
    """Pull the plug of a host out of the switch."""
    subprocess.run([*_in_switch(hub), "link", "set", f"p{host}", "down"], check=True)


def take_away(hub, host):
    """Take away the plug of a host that has ended, whose namespace may take a moment longer to end."""
    subprocess.run([*_in_switch(hub), "link", "delete", f"p{host}"], check=False, stderr=subprocess.DEVNULL)


def _in_switch(hub):
    return ["nsenter", f"--net=/proc/{hub}/ns/net", "ip"]


if __name__ == "__main__":
    # two_hosts.py HOST HUB COMMAND …: run a command on one of them.
    Shaped(2, int(sys.argv[2])).enter(int(sys.argv[1]))
    os.execvp(sys.argv[3], sys.argv[3:])
