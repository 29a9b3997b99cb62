"""Decides who runs and who waits; owns request state. Imports neither torch nor the engine."""

from phalanx.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
