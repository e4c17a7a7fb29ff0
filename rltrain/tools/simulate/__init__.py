"""``rltrain simulate``: what a step would take on a device that need not be there, and which layout would be best.

`request` reads the words, `calibration` learns from a run, `sweep` tries combinations, `report` writes it all down;
what is foretold is `rltrain.run.seconds`'.
"""
