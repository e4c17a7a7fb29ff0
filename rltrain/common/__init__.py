"""Shared basis of all packages: errors, environment, devices, logs, storage, plug-ins."""

__version__ = "0.2.0"
