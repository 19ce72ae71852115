"""One pipeline stage of a model: what it consists of, how it is cut, and how it runs segment by segment."""
