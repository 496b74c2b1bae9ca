"""gigatoken in a library's place: the same ids in a tenth of the time, used only if they compare equal."""
