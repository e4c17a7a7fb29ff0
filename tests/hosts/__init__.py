"""Hosts on one machine, each a set of namespaces (network, mounts, name, processes) on a switch. See `hosts.py`."""
