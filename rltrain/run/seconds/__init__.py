"""Seconds of a step, foretold from the configuration, a chip, the lengths of answers, and assumptions that are told.

`lengths` says how long answers are, `engine` answers them event by event, `passes` lays samples out as a step does and
times the micro-batches, `step` adds the phases up; `assumptions` is all that is not counted; `about` is the line of a
dry run. Nothing here needs a device or weights.
"""
