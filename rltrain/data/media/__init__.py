"""Videos, and the pixels and tokens of images and videos."""
