"""Whether a mathematical answer is the right one: one spelling for LaTeX, exact numbers, then algebra."""
