"""The HTTP side: one API worker process, `python -m phalanx.server`, started by the launcher."""
