"""One pipeline stage of a model: how it is cut out of the model, and how it runs segment by segment."""
