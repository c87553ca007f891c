"""Several ranks and one process give the same tokens; a rank that dies takes the others along, within a deadline."""
