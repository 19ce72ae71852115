"""What all cases share: quiet times, rounds, records, tables, and the options of the command line."""
