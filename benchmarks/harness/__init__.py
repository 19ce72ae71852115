"""What all cases share: quiet times, rounds, records, tables, pictures, and the options of the command line."""
