"""``rltrain resolution``: searches the pixel bounds with the best accuracy for a model with images.

`request` reads the arguments, `settings` lists the bounds to try and their image tokens, `search` evaluates them.
"""
