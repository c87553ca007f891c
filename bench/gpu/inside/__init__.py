"""The inside of a kernel on a GPU: hardware counters, and time stamps."""
