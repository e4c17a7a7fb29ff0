"""Shared basis of all packages: errors, environment, devices, logs, storage, plug-ins."""
