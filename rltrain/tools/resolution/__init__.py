"""``rltrain resolution``: searches the pixel bounds with the best accuracy for a model with images.

`request` reads the arguments, `search` lists the bounds to try with their image tokens, and evaluates them.
"""
