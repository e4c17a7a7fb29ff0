"""What every room may use: errors, the environment, devices, logs, storage, plug-ins."""
