"""states: recurrent states of hybrid models beside the pages: a second pool of frames, and the pages they belong to."""
