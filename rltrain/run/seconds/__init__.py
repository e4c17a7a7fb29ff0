"""Seconds of a step, estimated from the configuration, a chip, lengths of responses, and assumptions that are printed.

`lengths` draws the lengths, `engine` generates responses event by event, `passes` lays samples out as a step does and
times the micro-batches, `step` adds the phases up; `assumptions` holds the numbers that are not counted. Nothing here
needs a device or weights.
"""
