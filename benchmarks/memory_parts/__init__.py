"""What :mod:`memory` is made of: the model, what a rank measures, and the table."""
