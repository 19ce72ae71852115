"""Products whose operands are rounded to fp8."""
