"""Grading of mathematical answers: normalised LaTeX, exact numbers, then algebra."""
