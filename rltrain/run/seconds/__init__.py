"""Estimated time of a step, from the configuration, a chip, response lengths, and printed assumptions.

`lengths` draws the lengths, `engine` simulates generation event by event, `passes` lays out samples as a step does and
times the micro-batches, and `step` adds up the phases. `assumptions` holds the numbers that are not computed. Neither a
device nor weights are needed.
"""
