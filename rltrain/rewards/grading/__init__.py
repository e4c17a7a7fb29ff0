"""Whether a mathematical answer is the right one: LaTeX brought into one spelling, numbers, and algebra by math-verify."""
